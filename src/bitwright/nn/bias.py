"""The int32 bias of an integer layer: its integers, with a straight-through gradient."""

from typing import Any

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


class _RoundBias(torch.autograd.Function):
    """round(bias / scale), limited to int32, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(scale)
        return torch.round(bias.double() / scale.double()).clamp(-INT32_MAX, INT32_MAX).to(bias.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (scale,) = ctx.saved_tensors
        return grads[0] / scale, None


def round_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The integers of an int32 bias, as floats, with a straight-through gradient."""
    return _RoundBias.apply(bias, scale)
