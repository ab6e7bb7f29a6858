"""Mixins and helpers for quantized modules of one's own."""

from bitwright.nn.modules._utils import QuantInputMixin, QuantMixin, pop_quant_desc_in_kwargs

__all__ = ["QuantInputMixin", "QuantMixin", "pop_quant_desc_in_kwargs"]
