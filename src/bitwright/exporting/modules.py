"""The modules of a deployed model: constants stored as integers, and calls named after their nodes."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.errors import ExportError
from bitwright.exporting.sites import mark
from bitwright.nn.bias import round_bias
from bitwright.nn.functional import QuantFunction
from bitwright.numerics import dequantize, quantize_dequantize
from bitwright.numerics.fp8 import fp8_quantize_dequantize
from bitwright.numerics.pooling import global_average_pool
from bitwright.quantizer import TensorQuantizer


class Call(nn.Module):
    """A function or method call as a module."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target = node.target

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Make the call."""
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name what is called."""
        return qualified_name(self.target)


class DeployedQuantizer(nn.Module):
    """One place where a tensor is quantized, with the scale and zero point in force.

    Args:
        quantizer: the quantizer of the prepared model.
        site: the number of its site; None where it repeats another on values that are on the grid already.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, quantizer: TensorQuantizer, site: int | None = None) -> None:
        super().__init__()
        _check_uniform(quantizer)
        self.spec, self.axis, self.group = quantizer.spec, quantizer.method.axis, quantizer.method.group
        self.active = quantizer.quantizes
        self.site = site
        if not self.active and not quantizer.calibrated:
            return
        scale, zero_point = quantizer.qparams()
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("zero_point", zero_point.detach().clone())
        if self.spec.format.floating:
            self.guard = KeepFloat()

    def forward(self, x: Tensor) -> Tensor:
        """Quantize and dequantize."""
        if not self.active:
            return x
        out = self._round(x)
        return out if self.site is None else mark(out, self.site)

    def _round(self, x: Tensor) -> Tensor:
        if self.spec.format.floating:  # guarded: onnxruntime makes integer operators of fp8, and then refuses them
            return fp8_quantize_dequantize(self.guard(x), self.scale, self.spec.format.name, self.axis, self.group)
        limits = (self.spec.qmin, self.spec.qmax)
        return quantize_dequantize(x, self.scale, self.zero_point, *limits, self.axis, self.group)

    def extra_repr(self) -> str:
        """Show the spec."""
        return f"{self.spec}, axis {self.axis}, group {self.group}, {'on' if self.active else 'off'}"


class GlobalAveragePool(nn.Module):
    """Adaptive average pooling to a single value."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Average over all spatial dimensions."""
        return global_average_pool(x)


class KeepFloat(nn.Module):
    """Changes nothing, but runtimes do not look past it.

    onnxruntime quantizes the weight of a float layer between quantized tensors unasked; OpenVINO moves scales through
    concatenations along other axes than channels, and computes wrong values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(torch.finfo(torch.float32).min))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return torch.maximum(x, self.lowest)


class FloatLayer(nn.Module):
    """A layer whose weight quantizer the user disabled: it stays float in the runtime too."""

    def __init__(self, layer: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.layer, self.guard = layer, KeepFloat()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the float weight."""
        return self.guard(self.layer(*args, **kwargs))


class IntegerTensor(nn.Module):
    """A constant stored as integers."""

    integers: Tensor

    def __init__(
        self,
        integers: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        group: int | None,
        site: int | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.axis, self.group, self.site = axis, group, site

    def forward(self, *_: Tensor) -> Tensor:
        """The constant's values."""
        out = dequantize(self.integers, self.scale, self.zero_point, self.axis, self.group)
        return out if self.site is None else mark(out, self.site)

    def extra_repr(self) -> str:
        """Show where scales lie."""
        return f"axis {self.axis}, group {self.group}"


class DeployedLayer(nn.Module):
    """A layer with integer weight and int32 bias.

    Args:
        layer: the layer of the prepared model.
        weight_site: the number of its weight's site.
        input_site: the number of its input's site, where the quantizer is its own and not on the edge before it.
    """

    _layer: tuple[Any]

    def __init__(self, layer: Any, weight_site: int | None = None, input_site: int | None = None) -> None:  # noqa: ANN401
        super().__init__()
        weight, bias = layer.folded_weight()
        self.weight = as_integers(weight, layer.weight_quantizer, weight_site)
        scale = None if bias is None else layer.bias_scale()
        if bias is not None and scale is not None:
            self.bias: Any = _bias_as_integers(bias, scale)
        else:
            self.register_buffer("bias_value", bias)
            self.bias = None
        own = layer.input_quantizer
        self.input_quantizer = DeployedQuantizer(own, input_site) if isinstance(own, TensorQuantizer) else None
        self.quantizer = DeployedQuantizer(own if isinstance(own, TensorQuantizer) else own.quantizer)
        self._layer = (layer,)  # only asked to compute: in a tuple it is no submodule, its float weight is not exported

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the dequantized constants."""
        (layer,) = self._layer
        x = input if self.input_quantizer is None else self.input_quantizer(input)
        arranged = layer.arrange(x)
        if arranged is not x:
            arranged = self.quantizer(arranged)  # values are on the grid; runtimes look for a quantizer here
        bias = self.bias() if self.bias is not None else self.bias_value
        return layer.compute(arranged, self.weight(), bias, *args, **kwargs)

    def extra_repr(self) -> str:
        """Show the layer's settings."""
        return f"{type(self._layer[0]).__name__}({self._layer[0].extra_repr()})"


class DeployedFunction(nn.Module):
    """A function with its weight and bias as arguments, which are constants stored as integers."""

    def __init__(
        self, function: QuantFunction, weight: Tensor, bias: Tensor | None, weight_site: int | None = None
    ) -> None:
        super().__init__()
        self.function = function.function
        self.weight = as_integers(weight, function.weight_quantizer, weight_site)
        scale = None if bias is None else function.bias_scale()
        self.bias: Any = None
        self.register_buffer("bias_value", bias if scale is None else None)
        if bias is not None and scale is not None:
            self.bias = _bias_as_integers(bias, scale)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the dequantized constants."""
        bias = self.bias() if self.bias is not None else self.bias_value
        return self.function(input, self.weight(), bias, *args, **kwargs)

    def extra_repr(self) -> str:
        """Name the function."""
        return qualified_name(self.function)


class ComputedWeightFunction(nn.Module):
    """A function whose weight is computed while the model runs, and quantized then."""

    def __init__(self, function: QuantFunction, weight_site: int | None = None) -> None:
        super().__init__()
        self.function = function.function
        self.quantizer = DeployedQuantizer(function.weight_quantizer, weight_site)
        self.register_buffer("bias_scale", function.bias_scale())

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute with the weight quantized and the bias rounded."""
        if bias is not None and self.bias_scale is not None:
            bias = round_bias(bias, self.bias_scale) * self.bias_scale
        return self.function(input, self.quantizer(weight), bias, *args, **kwargs)

    def extra_repr(self) -> str:
        """Name the function."""
        return qualified_name(self.function)


def qualified_name(function: Any) -> str:  # noqa: ANN401
    """The name of a function, or of a method given as text."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def _check_uniform(quantizer: TensorQuantizer) -> None:
    if not quantizer.uniform and not quantizer.spec.format.floating:
        raise ExportError(
            f"the method {quantizer.method_name!r} of the {quantizer.label or 'tensor'} has no uniform grid, and "
            "ONNX knows no other; train with it, then export with a uniform method"
        )


def as_integers(weight: Tensor, quantizer: TensorQuantizer, site: int | None = None) -> IntegerTensor:
    """Store a constant in the integers its quantizer gives it."""
    _check_uniform(quantizer)
    method = quantizer.method
    scale, zero_point = (p.detach().clone() for p in quantizer.qparams())
    return IntegerTensor(quantizer.integers(weight.detach()), scale, zero_point, method.axis, method.group, site)


def _bias_as_integers(bias: Tensor, scale: Tensor) -> IntegerTensor:
    integers = round_bias(bias.double(), scale.double()).to(torch.int32)
    return IntegerTensor(integers, scale, torch.zeros_like(scale, dtype=torch.int32), 0 if scale.ndim else None, None)
