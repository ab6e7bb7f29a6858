"""onnxruntime's integer kernels on CPUs, to the bit, as observed with 1.31 on x86.

Accumulators are exact int32. Float32 arithmetic converts them to integers of the result:

    conv, linear, matmul    y = round(acc · (xs · ws / ys)) + yz            float result: acc · (xs · ws), then + bias
    add                     y = round(fma(a, as/ys, fma(b, bs/ys, yz - fma(as/ys, az, bs/ys · bz))))
    mul                     y = round((a - az) · (b - bz) · (as · bs / ys) + yz)
    average pool            y = round(sum / count / ys + yz), values summed one by one, row by row
    global average pool     y = round(sum · (xs / (ys · count))) + yz, integers summed
    concat, leaky relu      y = round(value / ys) + yz

It rounds half to even, then clamps to the byte. Each operation is rounded to float32, from left to right; those in
parentheses come first. Layouts and threads make no difference, except that adding a broadcast first operand takes the
two in turn.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitwright.exporting.interleaved import InterleavedLayer
from bitwright.exporting.modules import Call, DeployedFunction, DeployedLayer
from bitwright.exporting.parts import IntegerTensor
from bitwright.nn.operators.base import argument, each_dimension
from bitwright.simulation.arithmetic import GLOBAL_AVERAGE_POOL, Arithmetic, Operation, register_arithmetic
from bitwright.simulation.grid import Grid, Quantized, weight_integers

ONNXRUNTIME = register_arithmetic(Arithmetic("onnxruntime"))
_Stored = DeployedLayer | DeployedFunction
_NUMBER = "onnxruntime computes with a number or a float tensor in float"


def _not_a_pair(node: fx.Node, module: nn.Module) -> str:
    """Why an operator on two tensors is not computed in integers."""
    if len(node.all_input_nodes) < len(node.args) or len(node.args) != 2:
        return _NUMBER
    return "it multiplies by alpha first" if node.kwargs.get("alpha", 1) != 1 else ""


def _not_a_layer(node: fx.Node, module: nn.Module) -> str:
    """Why a layer is not computed in integers."""
    weight = module.stored.weight if isinstance(module, _Stored) else None
    if not isinstance(module, _Stored) or not isinstance(weight, IntegerTensor):
        return "its weight is not stored in integers"
    if weight.group is not None or weight.integers.dtype not in (torch.int8, torch.uint8):
        return "onnxruntime multiplies 8-bit weights, with one scale or one per output channel"
    if module.stored.has_bias and not isinstance(_bias(module, node.kwargs.get("call", 0)), IntegerTensor):
        return "its bias is not in int32"
    return ""


def _bias(module: Any, call: Any) -> nn.Module:  # noqa: ANN401
    return getattr(module.stored, module.stored.names[call])


def _products(module: Any, x: Quantized, *args: Any, call: int = 0, **kwargs: Any) -> Tensor:  # noqa: ANN401
    """A layer's sums of products, as integers in float64, which is exact."""
    weight, centred = weight_integers(module.stored.weight).to(x.integers.device), x.centred.double()
    return module.products(centred, weight, None, *args, **kwargs)


def _as_int32(sums: Tensor) -> Tensor:
    """Accumulators in int32, with its overflow, then rounded to float32."""
    return sums.to(torch.int64).to(torch.int32).float()


def _requantize(accumulators: Tensor, scale: Tensor, output: Grid | None) -> Tensor:
    """Convert accumulators in steps of ``scale`` to the result's integers, or to its values."""
    if output is None:
        return accumulators * scale
    return output.saturate(torch.round(accumulators * (scale / output.scale)) + output.zero_point)


@ONNXRUNTIME.kernel("conv1d", "conv2d", "conv3d", refusal=_not_a_layer)
def conv(operation: Operation, x: Quantized, *args: Any, **kwargs: Any) -> Tensor:
    """QLinearConv."""
    module: Any = operation.module
    sums = _products(module, x, *args, **kwargs)
    bias = _bias(module, kwargs.get("call", 0))
    spatial = [1] * (module.stored.weight.integers.ndim - 2)
    if isinstance(bias, IntegerTensor):
        sums = sums + bias.integers.to(sums.device).double().reshape(-1, *spatial)
    scale = x.grid.scale * module.stored.weight.scale.to(sums.device).float()
    return _requantize(_as_int32(sums), scale.reshape(-1, *spatial), operation.output)


def _not_in_phases(node: fx.Node, module: nn.Module) -> str:
    """Why a transposed convolution is not computed in integers."""
    split = isinstance(module, InterleavedLayer)
    return _not_a_layer(node, module) if split else "onnxruntime has no integer transposed convolution"


@ONNXRUNTIME.kernel("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", refusal=_not_in_phases)
def conv_transpose(operation: Operation, x: Quantized, *args: object, **kwargs: object) -> Tensor:
    """QLinearConv, whose results are interleaved."""
    module: Any = operation.module
    return module.way.interleave(conv(operation, x, *args, **kwargs))


@ONNXRUNTIME.kernel("linear", result_free=True, refusal=_not_a_layer)
def linear(operation: Operation, x: Quantized, *args: Any, **kwargs: Any) -> Tensor:
    """QGemm for matrices; else QLinearMatMul without a bias, and MatMulIntegerToFloat, Add and QuantizeLinear with."""
    module: Any = operation.module
    output = operation.output
    sums = _products(module, x, *args, **kwargs)
    bias = _bias(module, kwargs.get("call", 0))
    scale = x.grid.scale * module.stored.weight.scale.to(sums.device).float()
    if not isinstance(bias, IntegerTensor):
        return _requantize(_as_int32(sums), scale, output)
    if sums.ndim == 2:
        return _requantize(_as_int32(sums + bias.integers.to(sums.device).double()), scale, output)
    values = _as_int32(sums) * scale + bias().to(sums.device).float()
    return values if output is None else output.quantize(values)


@ONNXRUNTIME.kernel("matmul", result_free=True, refusal=_not_a_pair)
def matmul(operation: Operation, a: Quantized, b: Quantized) -> Tensor:
    """QLinearMatMul, or MatMulIntegerToFloat where the result is float."""
    sums = torch.matmul(a.centred.double(), b.centred.double())
    return _requantize(_as_int32(sums), a.grid.scale * b.grid.scale, operation.output)


@ONNXRUNTIME.kernel("add", refusal=_not_a_pair)
def add(operation: Operation, a: Quantized, b: Quantized, *, alpha: float = 1) -> Tensor:
    """QLinearAdd, which multiplies and adds in one rounding."""
    output = _quantized(operation)
    if _broadcasts(a.integers.shape, b.integers.shape):
        a, b = b, a
    first, second = a.grid.scale / output.scale, b.grid.scale / output.scale
    moved = output.zero_point - _fma(first, a.grid.zero_point, second * b.grid.zero_point)
    return output.saturate(torch.round(_fma(a.integers, first, _fma(b.integers, second, moved))))


@ONNXRUNTIME.kernel("mul", refusal=_not_a_pair)
def mul(operation: Operation, a: Quantized, b: Quantized) -> Tensor:
    """QLinearMul, which rounds after adding the zero point."""
    output = _quantized(operation)
    ratio = a.grid.scale * b.grid.scale / output.scale
    return output.saturate(torch.round(a.centred * b.centred * ratio + output.zero_point))


@ONNXRUNTIME.kernel("cat")
def cat(operation: Operation, tensors: Sequence[Quantized], dim: int = 0, **kwargs: Any) -> Tensor:
    """QLinearConcat."""
    output = _quantized(operation)
    return torch.cat([output.quantize(t.values) for t in tensors], kwargs.get("axis", dim))


@ONNXRUNTIME.kernel("leaky_relu")
def leaky_relu(operation: Operation, x: Quantized, *args: object, **kwargs: object) -> Tensor:
    """QLinearLeakyRelu, a table of what the float operator gives."""
    return _quantized(operation).quantize(operation.module(x.values, *args, **kwargs))


@ONNXRUNTIME.kernel(GLOBAL_AVERAGE_POOL)
def global_average_pool(operation: Operation, x: Quantized, *args: object, **kwargs: object) -> Tensor:
    """QLinearGlobalAveragePool."""
    output, spatial = _quantized(operation), x.integers.shape[2:]
    sums = x.centred.double().sum(tuple(range(2, x.integers.ndim)), keepdim=True)
    ratio = x.grid.scale / (output.scale * float(math.prod(spatial)))
    return output.saturate(torch.round(_as_int32(sums) * ratio) + output.zero_point)


def _not_a_plain_pool(node: fx.Node, module: nn.Module) -> str:
    ceil, divisor = (_pool_setting(node, module, *which) for which in ((4, "ceil_mode"), (6, "divisor_override")))
    return "in ceil_mode, or with its own divisor, the file has other operators for it" if ceil or divisor else ""


def _pool_setting(node: fx.Node, module: nn.Module, position: int, name: str) -> Any:  # noqa: ANN401
    return argument(node, None if isinstance(module, Call) else module, position, name)


@ONNXRUNTIME.kernel("avg_pool1d", "avg_pool2d", "avg_pool3d", refusal=_not_a_plain_pool)
def average_pool(operation: Operation, x: Quantized, *args: Any, **kwargs: Any) -> Tensor:
    """QLinearAveragePool, which adds up float32 values in the order of the window."""
    output, rank = _quantized(operation), x.integers.ndim - 2
    kernel, stride, padding, include = _pool_settings(operation.module, rank, *args, **kwargs)
    edges = [p for size in reversed(padding) for p in (size, size)]
    values, ones = F.pad(x.values, edges), F.pad(torch.ones_like(x.values[:1, :1]), edges)
    if include:
        ones = torch.ones_like(ones)
    total, count = (_window_sum(t, kernel, stride) for t in (values, ones))
    return output.saturate(torch.round(total / count / output.scale + output.zero_point))


def _pool_settings(
    module: Any,  # noqa: ANN401
    rank: int,
    kernel_size: Any = None,  # noqa: ANN401
    stride: Any = None,  # noqa: ANN401
    padding: Any = 0,  # noqa: ANN401
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    **unused: Any,
) -> tuple[list[int], list[int], list[int], bool]:
    if not isinstance(module, Call):
        kernel_size, stride, padding = module.kernel_size, module.stride, module.padding
        count_include_pad = module.count_include_pad
    kernel = each_dimension(kernel_size, rank)
    return kernel, each_dimension(stride, rank) if stride else kernel, each_dimension(padding, rank), count_include_pad


def _window_sum(x: Tensor, kernel: list[int], stride: list[int]) -> Tensor:
    """Sums over windows, in float32, one value after the other in the order of memory."""
    for i, (size, step) in enumerate(zip(kernel, stride, strict=True)):
        x = x.unfold(2 + i, size, step)
    windows = x.flatten(-len(kernel))
    total = torch.zeros_like(windows[..., 0])
    for place in range(windows.shape[-1]):
        total = total + windows[..., place]
    return total


def _quantized(operation: Operation) -> Grid:
    if operation.output is None:
        raise TypeError("this kernel returns integers, but its result has no grid")
    return operation.output


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a · b + c`` rounded once: float64 holds the product and, of 8-bit factors, the sum."""
    return (a.double() * b.double() + c.double()).float()


def _broadcasts(first: torch.Size, second: torch.Size) -> bool:
    """Whether one value of the first operand meets a run of the second: onnxruntime then swaps the two.

    Planes are in the layout that onnxruntime gives them, channels last.
    """
    rank = max(len(first), len(second))
    shapes = [[1] * (rank - len(shape)) + list(shape) for shape in (first, second)]
    order = [1, 3, 2, 0] if rank == 4 else range(rank - 1, -1, -1)
    sizes = next(((shapes[0][d], shapes[1][d]) for d in order if (shapes[0][d], shapes[1][d]) != (1, 1)), (1, 1))
    return sizes[0] == 1 != sizes[1]
