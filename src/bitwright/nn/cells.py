"""The equations of the recurrent cells, on tensors that are quantized already."""

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]


def lstm(x: Tensor, state: State, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> State:
    """One step of an LSTM: (h, c) -> (h', c'); the hidden state may be quantized, the cell's is not.

    i, f, g, o = W_ih x + b_ih + W_hh h + b_hh,   c' = σ(f) c + σ(i) tanh(g),   h' = σ(o) tanh(c')
    """
    h, c = state
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru(
    x: Tensor, h: Tensor, kept: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensor:
    """One step of a GRU on a hidden state ``h`` that may be quantized; ``kept`` is the same in full precision.

    r, z = σ(W x + b + W' h + b'),   n = tanh(W_n x + b_n + r (W'_n h + b'_n)),   h' = (1 - z) n + z h
    """
    r_x, z_x, n_x = F.linear(x, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    z = torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return (1 - z) * n + z * kept
