"""Mixins and helpers for quantized modules, under their familiar name."""

from bitwright.nn.mixins import QuantInputMixin, QuantMixin, pop_quant_desc_in_kwargs

__all__ = ["QuantInputMixin", "QuantMixin", "pop_quant_desc_in_kwargs"]
