"""The int32 bias of an integer layer: its integers, with a straight-through gradient."""

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def round_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """Round a bias to the integers of int32, as floats, with a straight-through gradient within its limits."""
    steps = (bias.double() / scale.double()).clamp(-INT32_MAX, INT32_MAX)
    return (steps + (torch.round(steps) - steps).detach()).to(bias.dtype)  # exact, in double precision


def rounded_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The values of an int32 bias, computed in float32 if the bias is in half precision."""
    wide = bias.to(torch.promote_types(bias.dtype, scale.dtype))
    return (round_bias(wide, scale) * scale).to(bias.dtype)
