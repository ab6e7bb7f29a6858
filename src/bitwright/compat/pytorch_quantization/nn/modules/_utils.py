"""Mixins and helpers for quantized modules of one's own."""

from typing import TypeVar

from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from bitwright.nn import mixins
from bitwright.nn.mixins import pop_quant_desc_in_kwargs

C = TypeVar("C", bound=type)


class QuantInputMixin(mixins.QuantInputMixin):
    """An operator with an ``input_quantizer``, which gives the old values."""

    quantizer_class = TensorQuantizer


class QuantMixin(mixins.QuantMixin, QuantInputMixin):
    """An operator with an ``input_quantizer`` and a ``weight_quantizer``, which give the old values."""


def as_before(cls: C, module: str) -> C:
    """A class of Bitwright with quantizers that give the old values, as a name of ``module``."""
    mixin = QuantMixin if issubclass(cls, mixins.QuantMixin) else QuantInputMixin
    return type(cls)(cls.__name__, (cls, mixin), {"__module__": module, "__doc__": cls.__doc__})  # pyrefly: ignore


__all__ = ["QuantInputMixin", "QuantMixin", "pop_quant_desc_in_kwargs"]
