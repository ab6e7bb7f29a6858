"""What makes a module a QModule: it owns, or refers to, the quantizers of its input and weight."""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.quantizer import Phase, TensorQuantizer

INT32_MAX = 2**31 - 1
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class PlacedQuantizer:
    """Stands in a QModule for a quantizer that already runs on the edge before it.

    Calling it changes nothing; everything else is asked of the quantizer on the edge. It is not a submodule,
    so the quantizer appears once in the model's state.
    """

    __slots__ = ("quantizer",)

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x``: its producer has quantized it."""
        return x

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "quantizer":  # not set yet, while being copied
            raise AttributeError(name)
        return getattr(self.quantizer, name)

    def __repr__(self) -> str:
        return f"placed {self.quantizer!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlacedQuantizer":
        from copy import deepcopy

        return PlacedQuantizer(deepcopy(self.quantizer, memo))


InputQuantizer = TensorQuantizer | PlacedQuantizer


class QuantInputMixin:
    """An operator with an ``input_quantizer``."""

    _input_quantizer: InputQuantizer

    @property
    def input_quantizer(self) -> InputQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer

    def place_input_quantizer(self, quantizer: TensorQuantizer) -> None:
        """Say that ``quantizer`` runs on the edge before this module."""
        self.__dict__.get("_modules", {}).pop("_input_quantizer", None)
        self._input_quantizer = PlacedQuantizer(quantizer)


class QuantMixin(QuantInputMixin):
    """An operator with an ``input_quantizer`` and a ``weight_quantizer``.

    A BatchNorm that follows can be folded in: it stays where it is in the model (so its parameters keep their
    names), is applied after the operator while weights are float, and multiplied into the weight once they
    are quantized.
    """

    channel_axis = 0
    weight: Tensor
    bias: Tensor | None
    _weight_quantizer: TensorQuantizer
    _folded: tuple[BatchNorm, ...] = ()
    quantize_bias = True

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""
        return self._weight_quantizer

    @property
    def folded_norm(self) -> BatchNorm | None:
        """The BatchNorm folded into this operator, if any."""
        return self._folded[0] if self._folded else None

    def fold_norm(self, norm: BatchNorm) -> None:
        """Apply ``norm`` as part of this operator."""
        if self._folded:
            raise ConfigError(f"{type(self).__name__} has a folded norm already")
        _statistics(norm)
        self._folded = (norm,)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """The operator itself as a function of its weight and bias."""
        raise NotImplementedError(f"{type(self).__name__} must say what it computes")

    def arrange(self, x: Tensor) -> Tensor:
        """Move values of the input before computing on them (pad by reflection); zeros and values only."""
        return x

    def per_output(self, values: Tensor) -> Tensor:
        """Shape one value per output channel to multiply the weight."""
        return values.reshape([-1 if d == self.channel_axis else 1 for d in range(self.weight.ndim)])

    def folded_weight(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the BatchNorm's running statistics multiplied in.

        w' = w · γ/√(var + eps),   b' = (b - mean) · γ/√(var + eps) + β
        """
        norm = self.folded_norm
        if norm is None:
            return self.weight, self.bias
        mean, var = _statistics(norm)
        factor = torch.rsqrt(var + norm.eps)
        if norm.weight is not None:
            factor = factor * norm.weight
        shift = -mean * factor
        if norm.bias is not None:
            shift = shift + norm.bias
        bias = shift if self.bias is None else self.bias * factor + shift
        return self.weight * self.per_output(factor), bias

    def bias_scale(self) -> Tensor | None:
        """The scale of the int32 bias, input scale times weight scale, or None where the bias stays float."""
        source = self.input_quantizer
        if not self.quantize_bias or source.phase is not Phase.QUANTIZE or self.weight_quantizer.spec.bits > 8:
            return None
        scale, step = self.weight_quantizer.qparams()[0].detach(), source.qparams()[0].detach()
        if step.ndim or scale.ndim > 1 or source.spec.bits > 8:
            return None
        return step * self.spread(scale)

    def spread(self, scale: Tensor) -> Tensor:
        """Repeat a weight scale so that there is one for each output channel."""
        return scale

    def deploy(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the deployed file has them (dequantized)."""
        scale = None if bias is None else self.bias_scale()
        if bias is not None and scale is not None:
            bias = round_bias(bias, scale) * scale
        return self.weight_quantizer(weight), bias

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the operator on the quantized input with the quantized weight."""
        x = self.arrange(self.input_quantizer(input))
        if self.weight_quantizer.phase is Phase.QUANTIZE:
            return self.compute(x, *self.deploy(*self.folded_weight()), *args, **kwargs)
        if self.weight_quantizer.phase is Phase.OBSERVE:
            self.weight_quantizer(self.folded_weight()[0])
        out = self.compute(x, self.weight, self.bias, *args, **kwargs)
        return out if self.folded_norm is None else self.folded_norm(out)


def _statistics(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError(f"a {type(norm).__name__} without running statistics cannot be folded")
    return norm.running_mean, norm.running_var


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
