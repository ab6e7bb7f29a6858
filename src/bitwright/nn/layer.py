"""QuantLayer: a layer with a weight that quantizes both, folds a BatchNorm in, and has an int32 bias."""

from typing import Any

from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.methods.learned_step import learned_step, recompute_quantized
from bitwright.nn.bias import round_bias
from bitwright.nn.descriptors import split_descriptors
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.norm import BatchNorm, multiplier, statistics, uses_batch
from bitwright.quantizer import QuantDescriptor

NEVER_ZERO = 2.0**-60  # added to what is divided by; far below the last bit of any real multiplier


class QuantLayer(QuantMixin):
    """Mixed before a layer of torch, takes its constructor's arguments and ``quant_desc_input``/``quant_desc_weight``.

    A BatchNorm that follows can be folded in: it stays where it is in the model (so its parameters keep their
    names), is applied after the operator while weights are float, and multiplied into the weight once they
    are quantized. In training it may normalise by the batch: see :mod:`bitwright.nn.norm`.
    """

    _folded: tuple[BatchNorm, ...] = ()
    quantize_bias = True
    training: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descriptors, rest = split_descriptors(type(self), kwargs)
        super().__init__(*args, **rest)
        self.init_quantizer(*descriptors)

    def init_quantizer(
        self,
        quant_desc_input: QuantDescriptor,
        quant_desc_weight: QuantDescriptor | None = None,
        num_layers: int | None = None,
    ) -> None:
        """Make the quantizers; described in this way, as no backend asks for an int32 bias, the bias stays float."""
        super().init_quantizer(quant_desc_input, quant_desc_weight, num_layers)
        self.quantize_bias = False

    @property
    def folded_norm(self) -> BatchNorm | None:
        """The BatchNorm folded into this operator, if any."""
        return self._folded[0] if self._folded else None

    def fold_norm(self, norm: BatchNorm) -> None:
        """Apply ``norm`` as part of this operator."""
        if self._folded:
            raise ConfigError(f"{type(self).__name__} has a folded norm already")
        statistics(norm)
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
        factor = multiplier(norm)
        shift = -statistics(norm)[0] * factor
        if norm.bias is not None:
            shift = shift + norm.bias
        bias = shift if self.bias is None else self.bias * factor + shift
        return self.weight * self.per_output(factor), bias

    def bias_scale(self) -> Tensor | None:
        """The scale of the int32 bias, input scale times weight scale, or None where the bias stays float."""
        source = self.input_quantizer
        if not self.quantize_bias or not source.quantizes or self.weight_quantizer.spec.bits > 8:
            return None
        if not (source.calibrated and self.weight_quantizer.calibrated):
            return None  # ranges are found on the fly: the bias stays float
        scale, step = self.weight_quantizer.qparams()[0].detach(), source.qparams()[0].detach()
        if step.ndim or scale.ndim > 1 or source.spec.bits > 8 or source.spec.format.floating:
            return None
        return step * self.spread(scale)

    def spread(self, scale: Tensor) -> Tensor:
        """Repeat a weight scale so that there is one for each output channel."""
        return scale

    def unfolded(self, norm: BatchNorm) -> tuple[Tensor, Tensor | None]:
        """Quantized weight and bias for a BatchNorm that is applied after: quantize(w·c)/c, with c = γ/√(var + eps)."""
        quantizer = self.weight_quantizer
        factor = multiplier(norm) + NEVER_ZERO
        weight = None
        if not quantizer.observes and quantizer.method.axis == self.channel_axis:
            weight = learned_step(quantizer.method, self.weight, factor)
        if weight is None:
            factor = self.per_output(factor)
            weight = quantizer(self.weight * factor) / factor
        return weight, self.bias

    def deploy(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the deployed file has them (dequantized).

        In training the bias stays float: its steps are those of the accumulator, far finer than the output's, and the
        gradient is the same.
        """
        scale = None if bias is None or self.training else self.bias_scale()
        if bias is not None and scale is not None:
            bias = round_bias(bias, scale) * scale
        return self.weight_quantizer(weight), bias

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the operator on the quantized input with the quantized weight."""
        x = self.arrange(self.input_quantizer(input))
        norm = self.folded_norm
        if self.weight_quantizer.quantizes:
            batch = norm if norm is not None and uses_batch(norm) else None
            constants = self.deploy(*self.folded_weight()) if batch is None else self.unfolded(batch)
            with recompute_quantized():
                out = self.compute(x, *constants, *args, **kwargs)
            return out if batch is None else batch(out)
        if self.weight_quantizer.observes:
            self.weight_quantizer(self.folded_weight()[0])
        out = self.compute(x, self.weight, self.bias, *args, **kwargs)
        return out if norm is None else norm(out)
