"""Quantized modules that the old toolkit does not have."""

from bitwright import nn as _nn
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before as _as_before

QuantAdd = _as_before(_nn.QuantAdd, __name__)
QuantBatchNorm1d = _as_before(_nn.QuantBatchNorm1d, __name__)
QuantBatchNorm2d = _as_before(_nn.QuantBatchNorm2d, __name__)
QuantBatchNorm3d = _as_before(_nn.QuantBatchNorm3d, __name__)
QuantCat = _as_before(_nn.QuantCat, __name__)
QuantEmbedding = _as_before(_nn.QuantEmbedding, __name__)
QuantGroupNorm = _as_before(_nn.QuantGroupNorm, __name__)
QuantGRU = _as_before(_nn.QuantGRU, __name__)
QuantLayerNorm = _as_before(_nn.QuantLayerNorm, __name__)
QuantMatMul = _as_before(_nn.QuantMatMul, __name__)
QuantMul = _as_before(_nn.QuantMul, __name__)
QuantMultiheadAttention = _as_before(_nn.QuantMultiheadAttention, __name__)
