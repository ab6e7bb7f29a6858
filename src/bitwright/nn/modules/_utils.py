"""Mixins and helpers for quantized modules, under the name they are known by."""

from bitwright.nn.descriptors import pop_quant_desc_in_kwargs
from bitwright.nn.mixins import QuantInputMixin, QuantMixin

__all__ = ["QuantInputMixin", "QuantMixin", "pop_quant_desc_in_kwargs"]
