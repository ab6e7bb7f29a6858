"""Quantized recurrent layers, with and without "Quant" in their names."""

from bitwright.nn import QuantLSTM, QuantLSTMCell

LSTM = QuantLSTM
LSTMCell = QuantLSTMCell
