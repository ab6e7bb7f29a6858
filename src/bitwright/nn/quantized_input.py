"""torch modules with a quantized input and every argument of the originals: activations, norms, pools."""

from typing import Any

from torch import nn

from bitwright.nn.mixins import QuantInputMixin, TakesDescriptors
from bitwright.nn.registry import register_qmodule


class QuantizedInput(TakesDescriptors, QuantInputMixin):
    """Mixed before a torch module, takes its constructor's arguments and ``quant_desc_input``.

    Attributes:
        gives_way: whether a user's class may be registered for the same source without ``override``.
        by_default: whether ``swap_modules`` without a backend and ``quant_modules.initialize`` use the class by
            default.
    """

    gives_way = True
    by_default = False

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        original: Any = super()
        return original.forward(self.input_quantizer(input), *args, **kwargs)


def _quantized(source: type[nn.Module], *, by_default: bool = False) -> Any:  # noqa: ANN401
    """Register a class that quantizes the input of a torch module."""
    about = {
        "__doc__": f"nn.{source.__name__} with a quantized input.",
        "__module__": __name__,
        "by_default": by_default,
    }
    return register_qmodule([source])(type(f"Quant{source.__name__}", (QuantizedInput, source), about))


QuantReLU = _quantized(nn.ReLU)
QuantReLU6 = _quantized(nn.ReLU6)
QuantLeakyReLU = _quantized(nn.LeakyReLU)
QuantPReLU = _quantized(nn.PReLU)
QuantELU = _quantized(nn.ELU)
QuantSELU = _quantized(nn.SELU)
QuantCELU = _quantized(nn.CELU)
QuantSiLU = _quantized(nn.SiLU)
QuantMish = _quantized(nn.Mish)
QuantGELU = _quantized(nn.GELU)
QuantHardswish = _quantized(nn.Hardswish)
QuantHardsigmoid = _quantized(nn.Hardsigmoid)
QuantHardtanh = _quantized(nn.Hardtanh)
QuantSigmoid = _quantized(nn.Sigmoid)
QuantTanh = _quantized(nn.Tanh)
QuantSoftplus = _quantized(nn.Softplus)
QuantSoftmax = _quantized(nn.Softmax)
QuantLogSoftmax = _quantized(nn.LogSoftmax)
QuantBatchNorm1d = _quantized(nn.BatchNorm1d)
QuantBatchNorm2d = _quantized(nn.BatchNorm2d)
QuantBatchNorm3d = _quantized(nn.BatchNorm3d)
QuantInstanceNorm1d = _quantized(nn.InstanceNorm1d)
QuantInstanceNorm2d = _quantized(nn.InstanceNorm2d)
QuantInstanceNorm3d = _quantized(nn.InstanceNorm3d)
QuantLayerNorm = _quantized(nn.LayerNorm)
QuantGroupNorm = _quantized(nn.GroupNorm)
QuantMaxPool1d = _quantized(nn.MaxPool1d)
QuantMaxPool2d = _quantized(nn.MaxPool2d)
QuantMaxPool3d = _quantized(nn.MaxPool3d)
QuantAvgPool1d = _quantized(nn.AvgPool1d, by_default=True)
QuantAvgPool2d = _quantized(nn.AvgPool2d, by_default=True)
QuantAvgPool3d = _quantized(nn.AvgPool3d, by_default=True)
QuantAdaptiveAvgPool1d = _quantized(nn.AdaptiveAvgPool1d, by_default=True)
QuantAdaptiveAvgPool2d = _quantized(nn.AdaptiveAvgPool2d, by_default=True)
QuantAdaptiveAvgPool3d = _quantized(nn.AdaptiveAvgPool3d, by_default=True)
