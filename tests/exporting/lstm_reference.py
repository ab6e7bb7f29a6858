"""An LSTM on integer weights with dynamic ranges, written out in numpy: int64 sums, one direction."""

import numpy as np

F = np.float32


def quantized(x):
    """Integers less their zero point, and the scale: u8 on the range of the tensor, zero included."""
    low, high = min(x.min(), F(0)), max(x.max(), F(0))
    scale = F((high - low) / F(255)) if high > low else F(1)
    point = np.rint(np.clip(-low / scale, 0, 255))
    return (np.clip(np.rint(x / scale) + point, 0, 255) - point).astype(np.int64), scale


def sigmoid(x):
    return F(1) / (F(1) + np.exp(-x))


def product(x, integers, scales):
    whole, scale = quantized(x)
    return (whole @ integers.T.astype(np.int64)).astype(F) * (scale * scales)


def dynamic_lstm(x, integers, scales, bias, steps):
    """Outputs (T, B, H), and the last states, from states of zeros; weights are (W, R) with the gates i, f, g, o."""
    batch, size = x.shape[1], integers[1].shape[1]
    h = c = np.zeros((batch, size), F)
    given, out = product(x, integers[0], scales[0]), np.zeros((x.shape[0], batch, size), F)
    for t in steps:
        i, f, g, o = np.split(given[t] + product(h, integers[1], scales[1]) + bias, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = out[t] = sigmoid(o) * np.tanh(c)
    return out, h, c
