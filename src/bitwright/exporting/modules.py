"""The modules of a deployed model that compute: layers and functions on stored integers, and calls as modules."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.exporting.parts import IntegerTensor, KeepFloat, Site, TableTensor, as_integers, deployed
from bitwright.nn.activation_parts import gated
from bitwright.nn.bias import INT32_MAX, round_bias, rounded_bias
from bitwright.nn.functional import QuantFunction
from bitwright.nn.products import deployed_function
from bitwright.numerics.grouped import grouped_product
from bitwright.numerics.pooling import global_average_pool
from bitwright.quantizer import TensorQuantizer
from bitwright.torch_internals import GROUPED_PRODUCTS


def _difference(a: Any, b: Any) -> Any:
    """``a - b``, where torch's exporter refuses a float number less a tensor of integers."""
    return a - (b.to(torch.result_type(a, b)) if isinstance(a, float) and isinstance(b, Tensor) else b)


def _reversed_difference(x: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    return _difference(other, x if alpha == 1 else alpha * x)


# Functions that the exporter takes in another form.
_DEPLOYED: dict[Any, Any] = {
    gated: torch.mul,
    operator.sub: _difference,
    torch.rsub: _reversed_difference,
    **dict.fromkeys(GROUPED_PRODUCTS, grouped_product),
}


class Call(nn.Module):
    """A function or method call as a module."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target = _DEPLOYED.get(node.target, node.target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def extra_repr(self) -> str:
        return qualified_name(self.target)


class GlobalAveragePool(nn.Module):
    """Adaptive average pooling to a single value."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return global_average_pool(x)


class _InPlaceOf(nn.Module):
    """Stands in for a layer, and passes on its weight and settings."""

    _layer: tuple[Any]  # in a tuple, so not a submodule: its float weight is exported only if something reads it

    def __getattr__(self, name: str) -> Any:
        if name != "_layer" and name not in self.__dict__["_modules"] and hasattr(layer := self._layer[0], name):
            return getattr(layer, name)  # not detached: an operation that nothing reads is too much for torch.export
        return super().__getattr__(name)


class FloatLayer(_InPlaceOf):
    """A layer whose weight quantizer the user disabled: it stays float in the runtime too."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer = (layer,)
        self.layer, self.guard = layer, KeepFloat()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.guard(self.layer(*args, **kwargs))


class StoredConstants(nn.Module):
    """Returns a stored weight and a bias, in int32 where it has a scale, which may differ from call to call."""

    def __init__(
        self, weight: IntegerTensor | TableTensor, bias: Tensor | None, scales: Sequence[Tensor | None]
    ) -> None:
        super().__init__()
        self.weight, self.has_bias = weight, bias is not None
        self.kept = KeepFloat() if isinstance(weight, TableTensor) else nn.Identity()
        self.register_buffer("float_bias", bias if None in scales else None)
        self.names = ["bias", *(f"bias_{call}" for call in range(1, len(scales)))]
        for name, scale in zip(self.names, scales, strict=True):
            self.add_module(name, nn.Identity() if bias is None or scale is None else _bias_as_integers(bias, scale))

    def guard(self, x: Tensor) -> Tensor:
        """The input of a layer; onnxruntime would quantize a weight of a table, or a large bias, unasked."""
        return self.kept(x)

    def forward(self, call: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.weight(), getattr(self, self.names[call])(self.float_bias)


class DeployedLayer(_InPlaceOf):
    """A layer with integer weight and int32 bias.

    It has an input site if the quantizer is its own and not on the edge before it.
    """

    def __init__(self, layer: Any, weight_site: Site | None = None, input_site: Site | None = None) -> None:
        super().__init__()
        self._layer = (layer,)
        weight, bias = layer.folded_weight()
        scales = [layer.bias_scale(call) for call in range(len(layer.calls))]
        stored = as_integers(weight, layer.weight_quantizer, weight_site)
        self.stored = StoredConstants(*self.lay_out(stored, bias, scales))
        own = layer.input_quantizer
        self.own_quantizer = deployed(own, input_site) if isinstance(own, TensorQuantizer) else None
        self.quantizers = nn.ModuleList(deployed(getattr(q, "quantizer", q)) for q in layer.calls)
        if _bias_overflows(layer, bias):
            self.stored.kept = KeepFloat()

    def forward(self, input: Tensor, *args: Any, call: int = 0, **kwargs: Any) -> Tensor:
        (layer,) = self._layer
        x = input if self.own_quantizer is None else self.own_quantizer(input)
        arranged = layer.arrange(x)
        if arranged is not x:
            arranged = self.quantizers[call](arranged)  # values are on the grid, but runtimes look for a quantizer here
        return self.compute(self.stored.guard(arranged), *self.stored(call), call, *args, **kwargs)

    def lay_out(
        self, weight: IntegerTensor | TableTensor, bias: Tensor | None, scales: Sequence[Tensor | None]
    ) -> tuple[IntegerTensor | TableTensor, Tensor | None, Sequence[Tensor | None]]:
        """The constants as the operator of the file needs them: weight, bias, and the bias's scale for each call."""
        return weight, bias, scales

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: int, *args: Any, **kwargs: Any) -> Tensor:
        """The operator itself."""
        return self._layer[0].compute(x, weight, bias, *args, **kwargs)

    def products(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """The sums of products, in the order that the weight has in the file."""
        layer = self._layer[0]
        return layer.compute(layer.arrange(x), weight, bias, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._layer[0]).__name__}({self._layer[0].extra_repr()})"


class DeployedFunction(nn.Module):
    """A function with its weight and bias as arguments, which are constants stored as integers."""

    def __init__(self, function: QuantFunction, weight: Tensor, bias: Tensor | None, site: Site | None) -> None:
        super().__init__()
        self.function = deployed_function(function.function)
        stored = as_integers(weight, function.weight_quantizer, site)
        self.stored = StoredConstants(stored, bias, [function.bias_scale()])

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.products(self.stored.guard(input), *self.stored(), *args, **kwargs)

    def products(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(x, weight, bias, *args, **kwargs)

    def extra_repr(self) -> str:
        return qualified_name(self.function)


class ComputedWeightFunction(nn.Module):
    """A function whose weight is computed while the model runs, and quantized then."""

    def __init__(self, function: QuantFunction, site: Site | None) -> None:
        super().__init__()
        self.function = function.function
        self.quantizer = deployed(function.weight_quantizer, site)
        self.register_buffer("bias_scale", function.bias_scale())

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if bias is not None and self.bias_scale is not None:
            bias = rounded_bias(bias, self.bias_scale)
        return self.function(input, self.quantizer(weight), bias, *args, **kwargs)

    def extra_repr(self) -> str:
        return qualified_name(self.function)


def qualified_name(function: Any) -> str:
    """The name of a function, or of a method given as text."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def _bias_overflows(layer: Any, bias: Tensor | None) -> bool:
    """Whether a float bias is too large for int32, which onnxruntime makes of it before a quantizer, unasked."""
    if bias is None or not bias.numel() or layer.weight_quantizer.spec.format.floating:
        return False
    sources = [q for i, q in enumerate(layer.calls) if layer.bias_scale(i) is None and q.quantizes and q.calibrated]
    scale = float(layer.weight_quantizer.qparams()[0].abs().min())
    steps = [float(q.qparams()[0].abs().min()) for q in sources if not q.spec.format.floating]
    return any(float(bias.abs().max()) >= step * scale * INT32_MAX for step in steps)


def _bias_as_integers(bias: Tensor, scale: Tensor) -> IntegerTensor:
    integers = round_bias(bias.double(), scale.double()).to(torch.int32)
    points = torch.zeros_like(scale, dtype=torch.int32)
    return IntegerTensor(integers, scale, points, 0 if scale.ndim else None, dtype=bias.dtype)
