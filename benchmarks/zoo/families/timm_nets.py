"""Families of timm, the smallest variant of each; attention nets with fewer blocks than published."""

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.families.family import Family, image

_SIZE = 96
_SHALLOW = {"depth": 2, "img_size": 96}
_NARROW = {**_SHALLOW, "embed_dim": 192, "num_heads": 3}

# Name, kind, size of its images, and what differs from the published variant.
_NETS: list[tuple[str, str, int, Mapping[str, Any]]] = [
    ("resnet10t", "cnn", _SIZE, {}),
    ("resnetv2_18", "cnn", _SIZE, {}),
    ("resnest14d", "cnn", _SIZE, {}),
    ("res2net50_48w_2s", "cnn", _SIZE, {"layers": (1, 1, 1, 1)}),
    ("skresnet18", "cnn", _SIZE, {}),
    ("legacy_seresnet18", "cnn", _SIZE, {}),
    ("regnetx_002", "cnn", _SIZE, {}),
    ("regnety_002", "cnn", _SIZE, {}),
    ("nf_resnet26", "cnn", _SIZE, {}),
    ("nf_regnet_b0", "cnn", _SIZE, {}),
    ("densenet121", "cnn", _SIZE, {"block_config": (2, 2, 2, 2)}),
    ("dla34", "cnn", _SIZE, {}),
    ("dpn48b", "cnn", _SIZE, {}),
    ("cs3darknet_focus_s", "cnn", 128, {}),
    ("hrnet_w18_small", "cnn", _SIZE, {}),
    ("selecsls42", "cnn", _SIZE, {}),
    ("ese_vovnet19b_slim", "cnn", _SIZE, {}),
    ("hgnetv2_b0", "cnn", _SIZE, {}),
    ("repvgg_a0", "cnn", _SIZE, {}),
    ("inception_v3", "cnn", 112, {}),
    ("tresnet_m", "cnn", _SIZE, {"layers": (1, 1, 1, 1)}),
    ("mobilenetv2_050", "depthwise cnn", _SIZE, {}),
    ("mobilenetv3_small_050", "depthwise cnn", _SIZE, {}),
    ("mobilenetv4_conv_small", "depthwise cnn", _SIZE, {}),
    ("efficientnet_lite0", "depthwise cnn", _SIZE, {}),
    ("tf_efficientnetv2_b0", "depthwise cnn", _SIZE, {}),
    ("lcnet_035", "depthwise cnn", _SIZE, {"num_classes": 21841}),
    ("ghostnet_050", "depthwise cnn", _SIZE, {}),
    ("repghostnet_050", "depthwise cnn", _SIZE, {}),
    ("mobileone_s1", "depthwise cnn", _SIZE, {}),
    ("rexnet_100", "depthwise cnn", _SIZE, {}),
    ("hardcorenas_a", "depthwise cnn", _SIZE, {}),
    ("xception41", "depthwise cnn", 128, {}),
    ("convnext_atto", "depthwise cnn", _SIZE, {"depths": (1, 1, 2, 1)}),
    ("convnextv2_atto", "depthwise cnn", _SIZE, {"depths": (1, 1, 2, 1)}),
    ("inception_next_atto", "depthwise cnn", _SIZE, {"depths": (1, 1, 2, 1)}),
    ("starnet_s050", "depthwise cnn", _SIZE, {}),
    ("fasternet_t0", "cnn", _SIZE, {}),
    ("mambaout_femto", "depthwise cnn", _SIZE, {"depths": (1, 1, 2, 1)}),
    ("repvit_m0_9", "depthwise cnn", _SIZE, {}),
    ("vit_tiny_patch16_224", "vision transformer", _SIZE, _SHALLOW),
    ("deit_tiny_distilled_patch16_224", "vision transformer", _SIZE, _SHALLOW),
    ("beit_base_patch16_224", "vision transformer", _SIZE, _NARROW),
    ("eva02_tiny_patch14_224", "vision transformer", 112, {"depth": 2, "img_size": 112}),
    (
        "swin_tiny_patch4_window7_224",
        "vision transformer",
        112,
        {"depths": (2, 2), "num_heads": (3, 6), "img_size": 112},
    ),
    ("swinv2_tiny_window8_256", "vision transformer", 128, {"depths": (2, 2), "num_heads": (3, 6), "img_size": 128}),
    ("cait_xxs24_224", "vision transformer", _SIZE, _SHALLOW),
    ("xcit_nano_12_p16_224", "vision transformer", _SIZE, _SHALLOW),
    ("levit_128s", "vision transformer", 224, {}),
    ("crossvit_tiny_240", "vision transformer", 240, {"depth": ((1, 1, 0),)}),
    ("convit_tiny", "vision transformer", _SIZE, {"depth": 2, "local_up_to_layer": 1, "img_size": 96}),
    ("pit_ti_224", "vision transformer", 224, {"depth": (1, 1, 1)}),
    ("visformer_tiny", "vision transformer", 224, {"depth": (1, 1, 1)}),
    ("coat_lite_tiny", "vision transformer", 224, {}),
    ("pvt_v2_b0", "vision transformer", _SIZE, {"depths": (1, 1, 1, 1)}),
    ("edgenext_xx_small", "vision transformer", 128, {}),
    ("mobilevit_xxs", "vision transformer", 128, {}),
    ("mobilevitv2_050", "vision transformer", 128, {}),
    ("efficientformer_l1", "vision transformer", 224, {}),
    ("efficientvit_b0", "vision transformer", 128, {}),
    ("davit_tiny", "vision transformer", _SIZE, {"depths": (1, 1, 1, 1)}),
    ("test_maxvit", "vision transformer", 160, {}),
    ("test_coatnet", "vision transformer", 160, {}),
    ("tiny_vit_5m_224", "vision transformer", 224, {"depths": (1, 1, 1, 1)}),
    ("twins_svt_small", "vision transformer", 224, {"depths": (1, 1, 2, 1)}),
    ("fastvit_t8", "vision transformer", 128, {}),
    ("sequencer2d_s", "recurrent", 224, {"layers": (1, 1, 1, 1)}),
    ("lambda_resnet26t", "cnn", 128, {}),
    ("inception_v4", "cnn", 112, {}),
    ("inception_resnet_v2", "cnn", 112, {}),
    ("pnasnet5large", "cnn", _SIZE, {}),
    ("nfnet_f0", "cnn", _SIZE, {}),
    ("dm_nfnet_f0", "cnn", _SIZE, {}),
    ("eca_nfnet_l0", "cnn", _SIZE, {}),
    ("botnet26t_256", "cnn", 128, {"img_size": 128}),
    ("halonet26t", "cnn", 256, {}),
    ("bat_resnext26ts", "cnn", 256, {}),
    ("eca_resnext26ts", "cnn", _SIZE, {}),
    ("gcresnext26ts", "cnn", _SIZE, {}),
    ("gernet_s", "cnn", _SIZE, {}),
    ("cspresnext50", "cnn", _SIZE, {}),
    ("dla60_res2net", "cnn", _SIZE, {}),
    ("densenetblur121d", "cnn", _SIZE, {"block_config": (2, 2, 2, 2)}),
    ("resnet50_gn", "cnn", _SIZE, {"layers": (1, 1, 1, 1)}),
    ("resnetv2_50d_frn", "cnn", _SIZE, {"layers": (1, 1, 1, 1)}),
    ("resnetv2_50d_evos", "cnn", _SIZE, {"layers": (1, 1, 1, 1)}),
    ("tf_efficientnet_es", "cnn", _SIZE, {}),
    ("legacy_xception", "depthwise cnn", _SIZE, {}),
    ("mixnet_s", "depthwise cnn", _SIZE, {}),
    ("tf_mixnet_s", "depthwise cnn", _SIZE, {}),
    ("tf_mobilenetv3_small_100", "depthwise cnn", _SIZE, {}),
    ("efficientnet_cc_b0_4e", "depthwise cnn", _SIZE, {}),
    ("ghostnetv2_100", "depthwise cnn", _SIZE, {}),
    ("ghostnetv3_050", "depthwise cnn", _SIZE, {}),
    ("regnetz_b16", "depthwise cnn", _SIZE, {}),
    ("cpubone_nano", "depthwise cnn", 128, {}),
    ("cspnext_tiny", "depthwise cnn", _SIZE, {}),
    ("lcnetv2_small", "depthwise cnn", _SIZE, {}),
    ("rdnet_tiny", "depthwise cnn", _SIZE, {}),
    ("fbnetv3_b", "depthwise cnn", _SIZE, {}),
    ("convnext_zepto_rms", "depthwise cnn", _SIZE, {}),
    ("efficientvit_m0", "vision transformer", 224, {}),
    ("efficientformerv2_s0", "vision transformer", 224, {}),
    ("csatv2", "vision transformer", 256, {}),
    ("deit3_small_patch16_224", "vision transformer", _SIZE, _SHALLOW),
    ("efficientvim_m1", "vision transformer", 224, {}),
    ("hiera_tiny_224", "vision transformer", 224, {"stages": (1, 1, 1, 1), "q_pool": 3}),
    ("sam2_hiera_tiny", "vision transformer", 224, {"stages": (1, 1, 2, 1), "global_att_blocks": (3,)}),
    ("iformer_t", "vision transformer", 224, {}),
    ("levit_conv_128s", "vision transformer", 224, {}),
    ("lowformer_b0", "vision transformer", 128, {}),
    ("shvit_s1", "vision transformer", 224, {}),
    ("swiftformer_xs", "vision transformer", 128, {}),
    ("swin_s3_tiny_224", "vision transformer", 224, {"depths": (1, 1, 1, 1)}),
    ("swinv2_cr_tiny_224", "vision transformer", 224, {"depths": (1, 1, 1, 1)}),
    ("tnt_s_patch16_224", "vision transformer", 224, {"depth": 2}),
    ("twins_pcpvt_small", "vision transformer", 224, {"depths": (1, 1, 1, 1)}),
    ("vit_tiny_r_s16_p8_224", "vision transformer", _SIZE, _SHALLOW),
    ("vit_relpos_small_patch16_224", "vision transformer", _SIZE, _SHALLOW),
    ("vit_base_patch16_siglip_224", "vision transformer", _SIZE, _NARROW),
    ("vit_base_patch16_rope_224", "vision transformer", _SIZE, _NARROW),
    ("vit_base_patch16_dinov3", "vision transformer", _SIZE, _NARROW),
    ("aimv2_large_patch14_224", "vision transformer", 112, {**_NARROW, "img_size": 112}),
    ("samvit_base_patch16_224", "vision transformer", _SIZE, {**_NARROW, "global_attn_indexes": (1,)}),
    ("mobilenetv4_hybrid_medium", "vision transformer", 128, {}),
    ("fastvit_mci0", "vision transformer", 128, {}),
    ("gemma4_vit_167m", "vision transformer", _SIZE, {"depth": 2}),
    ("qwen3_vit_88m", "vision transformer", _SIZE, {"depth": 2}),
    ("vitamin_small_224", "vision transformer", 224, {}),
]

_VOLO = {"layers": (1, 1, 1, 1), "embed_dims": (96, 192, 192, 192), "num_heads": (3, 6, 6, 6), "img_size": 96}
_GCVIT = {"depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4), "embed_dim": 32, "img_size": 128, "window_size": 4}
_NEST = {"depths": (1, 1, 1), "embed_dims": (64, 128, 192), "num_heads": (2, 4, 6)}
_MIXER = {"img_size": 96, "patch_size": 16, "num_blocks": 2, "embed_dim": 192}

# Those whose published variants fix their depth: name, kind, size of the images, module, class, and its arguments.
_OTHERS: list[tuple[str, str, int, str, str, Mapping[str, Any]]] = [
    ("convmixer", "depthwise cnn", _SIZE, "convmixer", "ConvMixer", {"dim": 192, "depth": 4}),
    ("mixer", "mlp", _SIZE, "mlp_mixer", "MlpMixer", _MIXER),
    ("poolformer", "mlp", _SIZE, "metaformer", "MetaFormer", {"depths": (1, 1, 1, 1), "dims": (32, 64, 128, 192)}),
    ("focalnet_srf", "vision transformer", _SIZE, "focalnet", "FocalNet", {"depths": (1, 1, 1, 1), "embed_dim": 48}),
    ("volo", "vision transformer", _SIZE, "volo", "VOLO", _VOLO),
    ("nasnet", "cnn", _SIZE, "nasnet", "NASNetALarge", {"stem_size": 24, "num_features": 960}),
    ("vgg", "cnn", _SIZE, "vgg", "VGG", {"cfg": [32, "M", 64, "M", 128, "M", 256, "M"], "mlp_ratio": 0.1}),
    ("gcvit", "vision transformer", 128, "gcvit", "GlobalContextVit", _GCVIT),
    ("nest", "vision transformer", 224, "nest", "Nest", _NEST),
    ("nextvit", "vision transformer", 128, "nextvit", "NextViT", {"in_chans": 3, "depths": (1, 1, 5, 1)}),
    ("big_transfer", "cnn", _SIZE, "resnetv2", "ResNetV2", {"layers": [1, 1, 1, 1], "stem_type": "fixed"}),
]


def _build(name: str, changes: Mapping[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, **changes)


def _build_class(module: str, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    return getattr(importlib.import_module(f"timm.models.{module}"), name)(**arguments)


def _gated_mlp() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    return MlpMixer(block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, mlp_ratio=6, **_MIXER)


def _residual_mlp() -> nn.Module:
    from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock

    return MlpMixer(block_layer=partial(ResBlock, init_values=0.1), norm_layer=Affine, mlp_ratio=4, **_MIXER)


def _caformer() -> nn.Module:
    from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv

    mixers, norms = [SepConv, SepConv, Attention, Attention], [*[LayerNorm2dNoBias] * 2, *[LayerNormNoBias] * 2]
    return MetaFormer(depths=(1, 1, 1, 1), dims=(32, 64, 128, 192), token_mixers=mixers, norm_layers=norms)


def _mvit() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    return MultiScaleVit(MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=48), img_size=(96, 96))


FAMILIES = [
    Family(name, "timm", kind, partial(_build, name, changes), partial(image, size=size))
    for name, kind, size, changes in _NETS
]
FAMILIES += [
    Family(name, "timm", kind, partial(_build_class, module, cls, arguments), partial(image, size=size))
    for name, kind, size, module, cls, arguments in _OTHERS
]
FAMILIES += [
    Family(name, "timm", kind, build, partial(image, size=_SIZE))
    for name, kind, build in (
        ("gated_mlp", "mlp", _gated_mlp),
        ("residual_mlp", "mlp", _residual_mlp),
        ("mvitv2", "vision transformer", _mvit),
        ("caformer", "vision transformer", _caformer),
        ("resnet18_features", "features only", partial(_build, "resnet18", {"features_only": True})),
    )
]
