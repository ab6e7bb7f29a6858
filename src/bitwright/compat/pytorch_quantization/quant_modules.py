"""Replace the layers of ``torch.nn`` by quantized ones: those that the old toolkit replaces."""

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn

from bitwright import quant_modules as _ours
from bitwright.compat.pytorch_quantization.onnx_export import enable_onnx_export
from bitwright.quant_modules import Replacement, deactivate, replaceable

_WITH_SIZES = ("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool")
REPLACED = (*(f"{name}{d}d" for name in _WITH_SIZES for d in (1, 2, 3)), "Linear", "LSTM", "LSTMCell")


def initialize(
    float_module_list: Iterable[str] | None = None, custom_quant_modules: Iterable[Replacement] | None = None
) -> ExitStack:
    """Let ``torch.nn.Conv2d`` and its like be their quantized versions; a second call replaces the first.

    Args:
        float_module_list: names of layers that stay float.
        custom_quant_modules: more replacements, as (module, name in it, class); they win over ``float_module_list``.
    """
    deactivate()
    possible = replaceable()
    # A layer that is never replaced may be named: it stays float indeed. A name that torch does not know is refused.
    asked = [name for name in float_module_list or () if name in possible or not hasattr(nn, name)]
    left = dict.fromkeys([*(name for name in possible if name not in REPLACED), *asked])
    return _ours.initialize(left, custom_quant_modules)


__all__ = ["deactivate", "enable_onnx_export", "initialize"]
