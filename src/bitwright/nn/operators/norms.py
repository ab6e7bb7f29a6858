"""Norms, and other operators that relate the values of a tensor to each other and keep its shape."""

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.nn.operators.base import Operator, Source, register_operator

_NORMS: dict[str, tuple[Source, ...]] = {
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, F.batch_norm, torch.batch_norm),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm),
    "layer_norm": (nn.LayerNorm, F.layer_norm, torch.layer_norm),
    "group_norm": (nn.GroupNorm, F.group_norm, torch.group_norm),
    "rms_norm": (nn.RMSNorm, F.rms_norm),
    "softmax": (nn.Softmax, F.softmax, torch.softmax, "softmax"),
    "log_softmax": (nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
}

for _name, _sources in _NORMS.items():
    register_operator(Operator(_name, _sources, same_shape=True))
