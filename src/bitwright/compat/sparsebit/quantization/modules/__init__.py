"""QModules: ``register_qmodule``, the class they derive from, and Bitwright's own by Sparsebit's names.

Operators that move values stay functions in a prepared model. Here their names are the operators' records, for the
``op_type`` of patterns.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from bitwright import nn as _nn
from bitwright.compat.old_paths import add_paths
from bitwright.compat.refused import refuse
from bitwright.nn.operators import OPERATORS as _OPERATORS
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import QMODULES as QMODULE_MAP
from bitwright.nn.registry import register_qmodule as _register

C = TypeVar("C", bound=type)


def register_qmodule(sources: Iterable[Any], *, override: bool = True) -> Callable[[C], C]:
    """Register a QModule for the modules, functions and tensor methods that it replaces; the last one wins."""
    return _register(sources, override=override)


# Sparsebit's name for each of Bitwright's classes, where it is not Q and the rest of the name.
_CLASSES = {"QHardSigmoid": "Hardsigmoid", "QMatmul": "MatMul", "MatMul": "MatMul", "Concat": "Cat"}
_RECORDS = {
    "QSubtract": "sub",
    "QDivide": "div",
    "QMean": "mean",
    "QUpsample": "interpolate",
    "QInterpolate": "interpolate",
    "QDropout": "dropout",
    "Dropout": "dropout",
    "QIdentity": "identity",
    "Contiguous": "contiguous",
    "QGetItem": "getitem",
    **{name.title(): name for name in ("flatten", "reshape", "expand", "transpose", "permute", "split")},
}
_PATHS = {
    "activations": "QReLU QReLU6 QLeakyReLU QSiLU QMish QHardSigmoid QSigmoid QGELU QTanh QSoftmax",
    "base": "QuantOpr",
    "conv": "QConv2d QConvTranspose2d",
    "embedding": "QEmbedding",
    "linear": "QLinear",
    "math": "QAdd QSubtract QMul QDivide QMatmul QMean",
    "matmul": "MatMul QMatmul",
    "normalization": "QBatchNorm1d QBatchNorm2d QLayerNorm",
    "pool": "QAvgPool2d QAdaptiveAvgPool2d QMaxPool2d MaxPool2d",
    "python_builtins": "QGetItem",
    "resize": "QUpsample QInterpolate",
    "shape": "Flatten Reshape Concat Expand Transpose Permute Split",
    "unary": "QIdentity QDropout Dropout Contiguous",
}
_NAMED = dict.fromkeys(" ".join(_PATHS.values()).split()).keys() - _RECORDS - {"QuantOpr"}
globals().update({name: getattr(_nn, f"Quant{_CLASSES.get(name, name.removeprefix('Q'))}") for name in _NAMED})
globals().update({name: _OPERATORS.get(record) for name, record in _RECORDS.items()})
_SEVERAL = {"MultipleInputsQuantOpr": "derive from QuantOpr, and call self.input_quantizer on each tensor in forward"}
__getattr__ = refuse(__name__, _SEVERAL)
add_paths(
    __name__,
    _PATHS,
    refused={
        "base": _SEVERAL,
        "math": {"QFloorDiv": "match operator.floordiv, which computes with sizes and stays float"},
        "python_builtins": {
            "QGetAttr": "attributes such as x.shape are read while the model is captured",
            "QEqual": "comparisons run while the model is captured; match operator.eq",
        },
        "shape": {
            "Size": "match torch.Tensor.size; shapes are read while the model is captured",
            "Expand_as": "match torch.Tensor.expand_as",
        },
        "unary": {name: f"match torch.Tensor.{name.lower()}" for name in ("Clone", "Detach", "Where")},
        "torchvision_ops": {"StochasticDepth": "it stays float, and computes nothing once a model is evaluated"},
    },
)
