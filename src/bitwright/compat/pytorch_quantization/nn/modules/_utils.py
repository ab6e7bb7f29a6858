"""Mixins and helpers for your own quantized modules."""

from typing import TypeVar

from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from bitwright.nn import mixins
from bitwright.nn.mixins import pop_quant_desc_in_kwargs

C = TypeVar("C", bound=type)


class QuantInputMixin(mixins.QuantInputMixin):
    """An operator with an ``input_quantizer`` that computes the old values."""

    quantizer_class = TensorQuantizer


class QuantMixin(mixins.QuantMixin, QuantInputMixin):
    """An operator with an ``input_quantizer`` and a ``weight_quantizer`` that compute the old values."""


def as_before(cls: C, module: str) -> C:
    """A Bitwright class with quantizers that compute the old values, under a name in ``module``."""
    mixin = QuantMixin if issubclass(cls, mixins.QuantMixin) else QuantInputMixin
    return type(cls)(cls.__name__, (cls, mixin), {"__module__": module, "__doc__": cls.__doc__})  # pyrefly: ignore


__all__ = ["QuantInputMixin", "QuantMixin", "pop_quant_desc_in_kwargs"]
