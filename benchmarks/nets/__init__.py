"""Five published architectures in plain torch, random weights, for benchmarks and capture tests."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .densenet121 import densenet121
from .mobilenet_v2 import mobilenet_v2
from .mobilenet_v3 import mobilenet_v3_small
from .resnet18 import resnet18
from .unet import unet

__all__ = [
    "NETS",
    "densenet121",
    "example_input",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "randomize_batchnorm",
    "resnet18",
    "unet",
]

NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3_small": mobilenet_v3_small,
    "unet": unet,
    "densenet121": densenet121,
}


def example_input(name: str, batch: int = 1) -> torch.Tensor:
    """Draws a random image batch from the global random state.

    Shapes: `(batch, 3, 224, 224)` for classifiers, `(batch, 3, 128, 128)` for the U-Net. Like a
    normalised photo, an image has mean about 0, variance about 1 and structure at every scale.
    White noise has none, and all of it looks the same after global average pooling.

    Raises:
        KeyError: `name` is not a key of `NETS`.
    """
    if name not in NETS:
        raise KeyError(f"no benchmark network is named {name!r}; choose from {', '.join(NETS)}")
    size = 128 if name == "unet" else 224
    image = 0.5 * torch.randn(batch, 3, size, size)
    for cells in (1, 4, 16, 64):
        coarse = torch.randn(batch, 3, cells, cells)
        image += F.interpolate(coarse, size=(size, size), mode="bilinear")
    return image / 1.6


def randomize_batchnorm(model: nn.Module, seed: int) -> None:
    """Gives every BatchNorm random statistics and affine parameters, in place.

    A fresh BatchNorm is the identity in evaluation mode, so folding it proves nothing. This draws
    mean ~ N(0, 0.5), variance ~ U(0.5, 1.5), gamma ~ U(0.5, 1.5) and beta ~ N(0, 0.2), the second
    number of a normal being its standard deviation. The global random state is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, nn.BatchNorm2d):
                continue
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_(0.0, 0.5, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
            if module.affine:
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0.0, 0.2, generator=generator)
