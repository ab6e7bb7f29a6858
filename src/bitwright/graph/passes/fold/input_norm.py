"""Layers that have folded in what stood before them: a map of each input channel,  x·c + d.

    w' = w · c,   b' = b + Σ w · d

While the weight is float the original operations run on the input; once it is quantized they are in the weight.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.graph.passes.fold.stand_in import Affine
from bitwright.nn.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from bitwright.nn.layer import BatchNorm, QuantLayer
from bitwright.nn.linear import QuantLinear

_NEVER_ZERO = 2.0**-60  # added to what is divided by; far below the last bit of any real factor


class InputNorm(QuantLayer):
    """Mixed before a quantized layer: applies norms to the input, or has them in its weight."""

    _before: tuple[BatchNorm, ...] = ()  # in the order in which they are computed

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer."""
        if not self.weight_quantizer.quantizes:
            for norm in self._before:
                input = norm(input)
        return super().forward(input, *args, **kwargs)

    def folded_weight(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with everything multiplied in, before and after."""
        return self._with_inputs(*super().folded_weight())

    def unfolded(self, norm: BatchNorm) -> tuple[Tensor, Tensor | None]:
        """Quantized weight and bias for a BatchNorm after the layer that goes by the batch, in training."""
        weight, bias = self._with_inputs(self.weight, self.bias)
        factor = self.per_output(_map(norm)[0] + _NEVER_ZERO)
        return self.weight_quantizer(weight * factor) / factor, bias

    def _with_inputs(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for norm in reversed(self._before):
            factor, shift = _map(norm)
            if not isinstance(norm, Affine) or norm.shifts:
                moved = (weight * self.per_input(shift)).flatten(1).sum(1)
                bias = moved if bias is None else bias + moved
            weight = weight * self.per_input(factor)
        return weight, bias

    def per_input(self, values: Tensor) -> Tensor:
        """Shape one value per input channel to multiply the weight."""
        layer: Any = self
        rest = [1] * (self.weight.ndim - 2)
        if isinstance(layer, nn.Linear):
            return values
        if layer.transposed:  # (in, out / groups, …)
            return values.reshape(-1, 1, *rest)
        grouped = values.reshape(layer.groups, 1, -1).expand(-1, self.weight.shape[0] // layer.groups, -1)
        return grouped.reshape(self.weight.shape[0], -1, *rest)  # (out, in / groups, …)


class QuantLinearInputNorm(InputNorm, QuantLinear):
    """QuantLinear that has folded in what stood before it."""


class QuantConv1dInputNorm(InputNorm, QuantConv1d):
    """QuantConv1d that has folded in what stood before it."""


class QuantConv2dInputNorm(InputNorm, QuantConv2d):
    """QuantConv2d that has folded in what stood before it."""


class QuantConv3dInputNorm(InputNorm, QuantConv3d):
    """QuantConv3d that has folded in what stood before it."""


class QuantConvTranspose1dInputNorm(InputNorm, QuantConvTranspose1d):
    """QuantConvTranspose1d that has folded in what stood before it."""


class QuantConvTranspose2dInputNorm(InputNorm, QuantConvTranspose2d):
    """QuantConvTranspose2d that has folded in what stood before it."""


class QuantConvTranspose3dInputNorm(InputNorm, QuantConvTranspose3d):
    """QuantConvTranspose3d that has folded in what stood before it."""


_WITH_INPUT_NORM: dict[type, type] = {
    cls.__mro__[2]: cls
    for cls in (
        QuantLinearInputNorm,
        QuantConv1dInputNorm,
        QuantConv2dInputNorm,
        QuantConv3dInputNorm,
        QuantConvTranspose1dInputNorm,
        QuantConvTranspose2dInputNorm,
        QuantConvTranspose3dInputNorm,
    )
}


def fold_input(layer: Any, norm: BatchNorm) -> None:
    """Let a layer apply ``norm`` before all that it does."""
    if not isinstance(layer, InputNorm):
        layer.__class__ = _WITH_INPUT_NORM[type(layer)]
    layer._before = (norm, *layer._before)


def can_fold_input(layer: QuantLayer) -> bool:
    """Whether there is a class that folds inputs for this layer's."""
    return isinstance(layer, InputNorm) or type(layer) in _WITH_INPUT_NORM


def shift_stays_out(layer: Any) -> str | None:
    """Why a shift of the input is not the same shift for every output of a layer, or None."""
    if isinstance(layer, nn.Linear):
        return None
    if layer.transposed:
        return "a transposed convolution does not see its shift at every place alike"
    padded = layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return "the layer pads with zeros, which it would shift" if padded and layer.padding_mode == "zeros" else None


def spread_of(norm: BatchNorm) -> float:
    """How many times its smallest factor the largest factor of a norm is; those that are zero do not count."""
    with torch.no_grad():
        factors = _map(norm)[0].abs()
    factors = factors[factors > 0]
    return float(factors.max() / factors.min()) if len(factors) else 1.0


def _map(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """A norm as factor and shift of each channel."""
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None:
        raise ValueError("a norm without running statistics")
    factor = torch.rsqrt(var + norm.eps)
    factor = factor if norm.weight is None else factor * norm.weight
    shift = -mean * factor
    return factor, shift if norm.bias is None else shift + norm.bias
