"""Families of torchvision: classifiers, segmentation, video, and detectors up to where boxes are selected."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.families.family import Family, image

_CLASSIFIERS: list[tuple[str, str, int]] = [
    ("alexnet", "cnn", 128),
    ("squeezenet1_1", "cnn", 96),
    ("googlenet", "cnn", 96),
    ("shufflenet_v2_x0_5", "depthwise cnn", 96),
    ("mnasnet0_5", "depthwise cnn", 96),
    ("efficientnet_b0", "depthwise cnn", 96),
    ("mobilenet_v3_large", "depthwise cnn", 96),
    ("resnext50_32x4d", "cnn", 96),
    ("wide_resnet50_2", "cnn", 96),
    ("efficientnet_v2_s", "depthwise cnn", 96),
]


def _classifier(name: str, **settings: Any) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, **settings)


def _swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    return SwinTransformer(
        [4, 4], 48, [2, 2], [2, 4], [4, 4], block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(96, 16, num_layers=2, num_heads=4, hidden_dim=192, mlp_dim=384)


class SegmentationOutput(nn.Module):
    """The map of a segmentation net, which is the entry `out` of what it returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Scores by pixel."""
        return self.net(x)["out"]


class Detector(nn.Module):
    """The backbone and the heads of a detector, without what selects boxes: that needs operators that are not here."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Any:  # noqa: ANN401
        """Scores and coordinates of all candidate boxes."""
        return self.head(list(self.backbone(images).values()))


def _segmentation(name: str) -> nn.Module:
    return SegmentationOutput(_classifier(name, weights_backbone=None))


def _detector(name: str) -> nn.Module:
    net = _classifier(name, weights_backbone=None)
    return Detector(net.backbone, net.rpn.head if hasattr(net, "rpn") else net.head)


def _video(name: str, settings: Mapping[str, Any]) -> nn.Module:
    return _classifier(name, **settings)


def _s3d() -> nn.Module:
    net = _classifier("s3d")
    net.avgpool = nn.AdaptiveAvgPool3d(1)  # the published one takes clips of 16 frames of 224 pixels
    return net


def _swin3d() -> nn.Module:
    from torchvision.models.video.swin_transformer import PatchEmbed3d, SwinTransformer3d

    return SwinTransformer3d(
        [2, 4, 4], 48, [2, 2], [3, 6], [4, 4, 4], norm_layer=nn.LayerNorm, patch_embed=PatchEmbed3d
    )


def _mvit_video() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 48, 48, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 4, 4]),
        MSBlockConfig(2, 48, 96, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        MSBlockConfig(2, 96, 96, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
    ]
    return MViT((56, 56), 8, blocks, True, True, True, True)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((128, 128), 32, 4, [32, 64, 128], [1, 1, 1], 16, 0.0)


def _clip(batch: int, size: int = 56) -> Tensor:
    return torch.stack([image(batch, size) for _ in range(8)], dim=2)


class Flow(nn.Module):
    """An optical flow net with two refinements, which returns the last flow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _classifier("raft_small")

    def forward(self, image1: Tensor, image2: Tensor) -> Tensor:
        """Where each pixel moves."""
        return self.net(image1, image2, num_flow_updates=2)[-1]


def _two_images(batch: int) -> dict[str, Tensor]:
    first = image(batch, 128)
    return {"image1": first, "image2": first.roll((2, -3), (2, 3))}


def _square(name: str, kind: str, build: Any, size: int) -> Family:  # noqa: ANN401
    return Family(name, "torchvision", kind, build, partial(image, size=size))


FAMILIES = [_square(name, kind, partial(_classifier, name), size) for name, kind, size in _CLASSIFIERS]
FAMILIES += [
    _square("swin_v2", "vision transformer", _swin_v2, 64),
    _square("vit_torchvision", "vision transformer", _vit, 96),
    _square("deeplabv3_mobilenet", "segmentation", partial(_segmentation, "deeplabv3_mobilenet_v3_large"), 128),
    _square("lraspp_mobilenet", "segmentation", partial(_segmentation, "lraspp_mobilenet_v3_large"), 128),
    _square("ssdlite320", "detection", partial(_detector, "ssdlite320_mobilenet_v3_large"), 320),
    _square("faster_rcnn_rpn", "detection", partial(_detector, "fasterrcnn_mobilenet_v3_large_320_fpn"), 160),
    _square("fcn_resnet50", "segmentation", partial(_segmentation, "fcn_resnet50"), 96),
    _square("deeplabv3_resnet50", "segmentation", partial(_segmentation, "deeplabv3_resnet50"), 96),
    _square("retinanet", "detection", partial(_detector, "retinanet_resnet50_fpn"), 128),
    _square("fcos", "detection", partial(_detector, "fcos_resnet50_fpn"), 128),
    _square("ssd300_vgg16", "detection", partial(_detector, "ssd300_vgg16"), 300),
    _square("maxvit", "vision transformer", _maxvit, 128),
    Family("r3d_18", "torchvision", "video", partial(_video, "r3d_18", {}), _clip),
    Family("mc3_18", "torchvision", "video", partial(_video, "mc3_18", {}), _clip),
    Family("r2plus1d_18", "torchvision", "video", partial(_video, "r2plus1d_18", {}), _clip),
    Family("s3d", "torchvision", "video", _s3d, partial(_clip, size=64)),
    Family("swin3d", "torchvision", "video", _swin3d, _clip),
    Family("mvit_video", "torchvision", "video", _mvit_video, _clip),
    Family("raft_small", "torchvision", "optical flow", Flow, _two_images),
]
