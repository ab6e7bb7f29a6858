"""Layers: convolutions, linear layers and embeddings."""

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.nn.operators.base import Operator, register_operator
from bitwright.nn.products import linear_as_written

_CONVOLUTIONS = ((nn.Conv1d, F.conv1d), (nn.Conv2d, F.conv2d), (nn.Conv3d, F.conv3d))
_TRANSPOSED = (
    (nn.ConvTranspose1d, F.conv_transpose1d),
    (nn.ConvTranspose2d, F.conv_transpose2d),
    (nn.ConvTranspose3d, F.conv_transpose3d),
)

for _rank, _sources in enumerate(_CONVOLUTIONS, 1):
    register_operator(Operator(f"conv{_rank}d", _sources, rank=_rank, weight=True))
for _rank, _sources in enumerate(_TRANSPOSED, 1):
    register_operator(Operator(f"conv_transpose{_rank}d", _sources, rank=_rank, weight=True, weight_axis=1))
register_operator(Operator("linear", (nn.Linear, F.linear, linear_as_written), weight=True))
register_operator(Operator("embedding", (nn.Embedding, F.embedding, torch.embedding)))
