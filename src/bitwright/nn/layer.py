"""QuantLayer: a layer that quantizes its input and weight, applies folds, and has an int32 bias."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bitwright.methods.learned_step import learned_step, recompute_quantized
from bitwright.nn.bias import rounded_bias
from bitwright.nn.channels import input_channels, output_channels, per_input, per_output
from bitwright.nn.fold import BatchNorm, Fold, apply_all, combine
from bitwright.nn.mixins import QuantMixin, TakesDescriptors
from bitwright.nn.placed import InputQuantizer, PlacedQuantizer
from bitwright.quantizer import TensorQuantizer

NEVER_ZERO = 2.0**-60  # added to divisors; far below the last bit of any real multiplier


class QuantLayer(TakesDescriptors, QuantMixin):
    """Mixed before a layer of torch, takes its constructor's arguments and ``quant_desc_input``/``quant_desc_weight``.

    Operators before and after this one, above all a BatchNorm, can be folded in: see :mod:`bitwright.nn.fold`. They
    stay where they are in the model, so their parameters keep their names. The layer applies them as written while its
    weight is float, and multiplies them into the weight once that is quantized. In training a BatchNorm may normalize
    by the batch: see :mod:`bitwright.nn.norm`.

    Attributes:
        before: folds on the input channels, in order.
        after: folds on the output channels, in order.
        scale_per_output: whether each output channel has its own weight scale, or all share one.
        quantize_bias: whether the bias has int32 steps of input scale times weight scale, as most backends require.
        multiplies_by_one: whether the operator alone returns its input, and is there only to take in a fold.
    """

    before: tuple[Fold, ...] = ()
    after: tuple[Fold, ...] = ()
    quantize_bias = False
    multiplies_by_one = False
    _later: tuple[InputQuantizer, ...] = ()
    _held: tuple[Tensor, Tensor | None] | None = None
    scale_per_output = True
    training: bool

    @property
    def folded_norm(self) -> BatchNorm | None:
        """The BatchNorm folded in after the operator, if any."""
        return next((fold.norm for fold in self.after if fold.norm is not None), None)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the operator itself as a function of its weight and bias."""
        raise NotImplementedError(f"{type(self).__name__} must define what it computes")

    def arrange(self, x: Tensor) -> Tensor:
        """Rearrange the input before computing (such as padding by reflection); may only add zeros and input values."""
        return x

    def weight_keys(self) -> list[str]:
        """The single weight quantizer, found without multiplying in the folds."""
        own = isinstance(getattr(self, "weight", None), Tensor) and hasattr(self, "_weight_quantizer")
        return ["_weight_quantizer"] if own else []

    def folded_weight(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the folds multiplied in, a BatchNorm by its running statistics."""
        weight, bias = self.weight, self.bias
        if self.after:
            factor, shift = combine(self.after, output_channels(self), weight)
            weight = weight * per_output(self, factor)
            bias = shift if bias is None else bias * factor if shift is None else bias * factor + shift
        return self._with_inputs(weight, bias)

    def _with_inputs(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Multiply in the folds before the operator:  w' = w·c,  b' = b + Σ w·d."""
        if not self.before:
            return weight, bias
        factor, shift = combine(self.before, input_channels(self), weight)
        if shift is not None:
            moved = (weight * per_input(self, shift)).flatten(1).sum(1)
            bias = moved if bias is None else bias + moved
        return weight * per_input(self, factor), bias

    def unfold(self, weight: Tensor) -> Tensor:
        """The weight that the folds turn into ``weight``."""
        if self.before:
            weight = weight / (per_input(self, combine(self.before, input_channels(self), weight)[0]) + NEVER_ZERO)
        if self.after:
            weight = weight / (per_output(self, combine(self.after, output_channels(self), weight)[0]) + NEVER_ZERO)
        return weight

    def place_calls(self, quantizers: Sequence[TensorQuantizer]) -> None:
        """Set the quantizers that run on the edges before the first, second, … call of this layer in a graph.

        The calls share the weight and its quantizer, but each has a bias in steps of its own input's scale. All calls
        except the first pass their number as ``call``.
        """
        self.place_input_quantizer(quantizers[0])
        self._later = tuple(PlacedQuantizer(q) for q in quantizers[1:])

    @property
    def calls(self) -> tuple[InputQuantizer, ...]:
        """The input quantizer of each call."""
        return (self.input_quantizer, *self._later)

    def bias_scale(self, call: int = 0) -> Tensor | None:
        """The scale of the int32 bias, input scale times weight scale, or None where the bias stays float."""
        source, weight = self.calls[call], self.weight_quantizer
        if not (self.quantize_bias and source.quantizes) or source.spec.format.floating:
            return None
        if not all(q.calibrated and q.method.uniform and q.spec.bits <= 8 for q in (source, weight)):
            return None  # ranges are found on the fly, products are not multiples of a step, or sums are too large
        scale, step = weight.qparams()[0].detach(), source.qparams()[0].detach()
        return None if step.ndim or scale.ndim > 1 else step * self.spread(scale)

    def spread(self, scale: Tensor) -> Tensor:
        """Repeat a weight scale to get one for each output channel."""
        return scale

    def unfolded(self) -> tuple[Tensor, Tensor | None]:
        """Quantized weight and bias for folds that are applied afterwards:  quantize(w·c)/c, with c their factor."""
        quantizer = self.weight_quantizer
        original, bias = self._with_inputs(self.weight, self.bias)
        factor = combine(self.after, output_channels(self), original)[0] + NEVER_ZERO
        weight = None
        if not quantizer.observes and quantizer.method.axis == self.channel_axis:
            weight = learned_step(quantizer.method, original, factor)
        if weight is None:
            factor = per_output(self, factor)
            weight = quantizer(original * factor) / factor
        return weight, bias

    @contextmanager
    def holding_folds(self) -> Iterator[None]:
        """Multiply in the folds once for all calls inside; the bias stays float, as in training."""
        self._held = self.folded_weight()
        try:
            yield
        finally:
            self._held = None

    def deploy(self, weight: Tensor, bias: Tensor | None, call: int = 0) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as in the deployed file (dequantized).

        In training the bias stays float: its steps are those of the accumulator, far finer than the output's, and the
        gradient is the same.
        """
        exact = self.training or self._held is not None
        scale = None if bias is None or exact else self.bias_scale(call)
        if bias is not None and scale is not None:
            bias = rounded_bias(bias, scale)
        return self.weight_quantizer(weight), bias

    def forward(self, input: Tensor, *args: object, call: int = 0, **kwargs: object) -> Tensor:
        if not self.weight_quantizer.quantizes:
            return self._forward_float(input, *args, **kwargs)
        x = self.arrange(self.calls[call](input))
        by_batch = any(fold.by_batch for fold in self.after)
        constants = self.unfolded() if by_batch else self.deploy(*(self._held or self.folded_weight()), call)
        with recompute_quantized():
            out = self.compute(x, *constants, *args, **kwargs)
        return apply_all(self.after, out) if by_batch else out

    def _forward_float(self, input: Tensor, *args: object, **kwargs: object) -> Tensor:
        x = self.arrange(self.input_quantizer(apply_all(self.before, input)))
        if self.weight_quantizer.observes:
            self.weight_quantizer(self.folded_weight()[0])
        out = x if self.multiplies_by_one else self.compute(x, self.weight, self.bias, *args, **kwargs)
        return apply_all(self.after, out)
