"""The quantized linear layer, with and without "Quant" in its name."""

from bitwright.nn import QuantLinear

Linear = QuantLinear
