"""MQBench's modules: ``qat`` has the quantized layers by its names."""

from bitwright.compat.mqbench.nn import qat
from bitwright.compat.mqbench.nn.frozen import FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d
