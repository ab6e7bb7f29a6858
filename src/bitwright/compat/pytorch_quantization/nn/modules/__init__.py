"""Quantized modules, under the old paths, with and without "Quant" in their names."""

from bitwright import nn as _nn
from bitwright.compat.old_paths import add_paths
from bitwright.compat.pytorch_quantization.nn.modules._utils import as_before

_DIMENSIONS = {
    "quant_conv": ("Conv", "ConvTranspose"),
    "quant_instancenorm": ("InstanceNorm",),
    "quant_pooling": ("MaxPool", "AvgPool", "AdaptiveAvgPool"),
}
_LAYERS = {
    **{path: [f"{name}{d}d" for name in names for d in (1, 2, 3)] for path, names in _DIMENSIONS.items()},
    "quant_linear": ["Linear"],
    "quant_rnn": ["LSTM", "LSTMCell"],
}
_MORE = (  # that the old toolkit does not have
    *("Add", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Cat", "Embedding", "GroupNorm", "GRU", "LayerNorm"),
    *("MatMul", "Mul", "MultiheadAttention"),
)
for _path, _names in {**_LAYERS, "": _MORE}.items():
    for _name in _names:
        _made = as_before(getattr(_nn, f"Quant{_name}"), f"{__name__}.{_path}".rstrip("."))
        globals().update({f"Quant{_name}": _made} if _names is _MORE else {f"Quant{_name}": _made, _name: _made})
add_paths(__name__, {path: [*names, *(f"Quant{name}" for name in names)] for path, names in _LAYERS.items()})
