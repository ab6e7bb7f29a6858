"""Quantized recurrent layers, with and without "Quant" in their names."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantLSTM = LSTM = _as_before(_nn.QuantLSTM, __name__)
QuantLSTMCell = LSTMCell = _as_before(_nn.QuantLSTMCell, __name__)
