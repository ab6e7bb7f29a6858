"""Quantized layers by MQBench's names."""

from bitwright.nn.conv import QuantConv2d as Conv2d
from bitwright.nn.conv import QuantConvTranspose2d as ConvTranspose2d
from bitwright.nn.embedding import QuantEmbedding as Embedding
from bitwright.nn.linear import QuantLinear as Linear

__all__ = ["Conv2d", "ConvTranspose2d", "Embedding", "Linear"]
