"""Random calls of onnxruntime's integer operators, and the same through Bitwright's kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from bitwright.cpu import has_vnni
from bitwright.exporting.modules import StoredConstants
from bitwright.exporting.parts import IntegerTensor
from bitwright.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d
from bitwright.nn.linear import QuantLinear
from bitwright.simulation import SIMULATED_RUNTIMES, Grid, Operation, Quantized

RULES = SIMULATED_RUNTIMES.get("onnxruntime").rules
CONTRIB = "com.microsoft"


def run(
    op: str,
    inputs: list[Any],
    attributes: dict[str, Any],
    *,
    domain: str = CONTRIB,
    free: tuple[int, ...] = (0,),
    kind: int = TensorProto.UINT8,
):
    """What onnxruntime's kernel gives; inputs are constants, except those at the positions ``free``."""
    arrays = {f"i{i}": np.asarray(a) for i, a in enumerate(inputs)}
    given = {name: a for name, a in arrays.items() if int(name[1:]) in free}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()
    ]
    stored = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n not in given]
    node = helper.make_node(op, list(arrays), ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info("y")], stored)
    floats = op == "MatMulIntegerToFloat" or (op == "QGemm" and len(inputs) == 7)
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT if floats else kind
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, given)[0]


@dataclass
class Draw:
    """Random integers and scales; half of the scales are simple fractions of one another, so that sums lie on ties."""

    rng: np.random.Generator

    def size(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        return bool(self.rng.integers(2))

    def bytes(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 256, shape).astype(np.uint8)

    def weight(self, *shape: int) -> np.ndarray:
        most = 127 if has_vnni() and self.flag() else 64
        return self.rng.integers(-most, most + 1, shape).astype(np.int8)

    def point(self) -> np.uint8:
        return np.uint8(self.rng.choice([0, 128, 255, self.size(0, 255)]))

    def scale(self, near: float | None = None) -> np.float32:
        if near is None:
            return np.float32(2.0 ** self.size(-8, 2) * self.rng.uniform(0.5, 2))
        if self.flag():
            return np.float32(near * self.size(1, 64) / self.size(1, 64))
        return np.float32(near * np.exp(self.rng.uniform(-2, 2)))


def grid(scale: Any, point: Any) -> Grid:
    return Grid(torch.tensor(float(scale)), torch.tensor(float(point)))


def quantized(integers: np.ndarray, scale: Any, point: Any) -> Quantized:
    return Quantized(torch.from_numpy(integers).float(), grid(scale, point))


def kernel(name: str, output: Grid | None, *args: Any, module: Any = None) -> np.ndarray:
    result = RULES[name].kernel(Operation(module or nn.Module(), output), *args)
    return result.numpy() if output is None else result.numpy().astype(np.uint8)


class Layer(nn.Module):
    """A layer with an integer weight, as the deployed model has it."""

    def __init__(self, layer: Any, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, step: Any) -> None:
        super().__init__()
        self._layer = (layer,)
        scales, point = torch.from_numpy(scale), torch.zeros(scale.shape, dtype=torch.int32)
        stored = IntegerTensor(torch.from_numpy(weight), scales, point, 0 if scale.ndim else None)
        steps = torch.tensor(float(step)) * scales
        values = None if bias is None else torch.from_numpy(bias).double() * steps.double()
        self.stored = StoredConstants(stored, values, [steps])

    def products(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._layer[0].compute(x, weight, bias)


def _weighted(draw: Draw, channels: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales of a weight and a bias."""
    base = draw.scale()
    scales = np.array([draw.scale(base) for _ in range(channels)] if draw.flag() else base, np.float32)
    return scales, draw.rng.integers(-5000, 5000, channels).astype(np.int32) if draw.flag() else None


def _result(draw: Draw, products: int, step: Any) -> np.float32:
    """A scale such that a few hundred steps cover most sums."""
    return draw.scale(float(np.mean(step)) * np.sqrt(products) * 30)


def conv(draw: Draw) -> tuple[Any, Any]:
    rank, groups, kind = draw.size(1, 3), draw.size(1, 3), draw.size(0, 2)
    inputs, outputs = groups * draw.size(1, 6), groups * draw.size(1, 6)
    if kind == 0:  # depthwise
        groups = inputs = outputs = draw.size(2, 40)
    kernel_size, stride, padding, dilation = draw.size(1, 3), draw.size(1, 2), draw.size(0, 2), draw.size(1, 2)
    x, weight = (
        draw.bytes(draw.size(1, 2), inputs, *[9 if rank < 3 else 6] * rank),
        draw.weight(outputs, inputs // groups, *[kernel_size] * rank),
    )
    scale, point, end = draw.scale(), draw.point(), draw.point()
    steps, bias = _weighted(draw, outputs)
    out = _result(draw, weight[0].size, scale * steps)
    attributes = {
        "strides": [stride] * rank,
        "pads": [padding] * 2 * rank,
        "dilations": [dilation] * rank,
        "group": groups,
    }
    zeros = np.zeros(steps.shape, np.int8)
    operands = [x, scale, point, weight, steps, zeros, out, end, *([] if bias is None else [bias])]
    theirs = run("QLinearConv", operands, attributes, domain="")
    settings = (inputs, outputs, kernel_size, stride, padding, dilation, groups)
    layer = (QuantConv1d, QuantConv2d, QuantConv3d)[rank - 1](*settings)
    module = Layer(layer, weight, steps, bias, scale)
    return kernel(f"conv{rank}d", grid(out, end), quantized(x, scale, point), module=module), theirs


def linear(draw: Draw) -> tuple[Any, Any]:
    rows, inputs, outputs = draw.size(1, 20), draw.size(1, 70), draw.size(1, 40)
    x, weight = draw.bytes(rows, inputs), draw.weight(outputs, inputs)
    scale, point, end = draw.scale(), draw.point(), draw.point()
    steps, bias = _weighted(draw, outputs)
    bias = np.zeros(outputs, np.int32) if bias is None else bias
    out = _result(draw, inputs, scale * steps) if draw.flag() else None
    operands = [x, scale, point, weight, steps, np.zeros(steps.shape, np.int8), bias]
    theirs = run("QGemm", [*operands, *([] if out is None else [out, end])], {"transB": 1})
    module = Layer(QuantLinear(inputs, outputs), weight, steps, bias, scale)
    output = None if out is None else grid(out, end)
    return kernel("linear", output, quantized(x, scale, point), module=module), theirs


def linear_of_rows(draw: Draw) -> tuple[Any, Any]:
    inputs, outputs = draw.size(1, 70), draw.size(1, 40)
    x, weight = draw.bytes(2, draw.size(1, 5), inputs), draw.weight(outputs, inputs)
    scale, point = draw.scale(), draw.point()
    steps, bias = _weighted(draw, outputs)
    module = Layer(QuantLinear(inputs, outputs), weight, steps, bias, scale)
    added = [] if bias is None else [bias.astype(np.float32) * (scale * steps)]
    zeros = np.zeros(steps.shape, np.int8)
    theirs = run("MatMulIntegerToFloat", [x, weight.T.copy(), scale, steps, point, zeros, *added], {})
    return kernel("linear", None, quantized(x, scale, point), module=module), theirs


def matmul(draw: Draw) -> tuple[Any, Any]:
    batch, rows, inner, columns = (draw.size(1, 4), *(draw.size(1, 30) for _ in range(3)))
    a, b = draw.bytes(batch, rows, inner), draw.bytes(batch, inner, columns)
    first, second, ends = draw.scale(), draw.scale(), [draw.point() for _ in range(3)]
    out = draw.scale(first * second * np.sqrt(inner) * 100)
    operands = [a, first, ends[0], b, second, ends[1], out, ends[2]]
    theirs = run("QLinearMatMul", operands, {}, domain="", free=(0, 3))
    pair = quantized(a, first, ends[0]), quantized(b, second, ends[1])
    return kernel("matmul", grid(out, ends[2]), *pair), theirs


def _pair(op: str, draw: Draw, factor: float | None) -> tuple[Any, Any]:
    shape = draw.size(1, 5), draw.size(1, 5), draw.size(2, 70)
    shapes = [shape, shape, shape[-1:], (1,)]
    which = [(0, 0), (0, 2), (2, 0), (0, 3), (3, 0)][draw.size(0, 4)]
    a, b = (draw.bytes(*shapes[i]) for i in which)
    first = draw.scale()
    second, ends = draw.scale(first), [draw.point() for _ in range(3)]
    out = draw.scale(first + second if factor is None else first * second * factor)
    theirs = run(f"QLinear{op}", [a, first, ends[0], b, second, ends[1], out, ends[2]], {}, free=(0, 3))
    pair = quantized(a, first, ends[0]), quantized(b, second, ends[1])
    return kernel(op.lower(), grid(out, ends[2]), *pair), theirs


def add(draw: Draw) -> tuple[Any, Any]:
    return _pair("Add", draw, None)


def mul(draw: Draw) -> tuple[Any, Any]:
    return _pair("Mul", draw, 100.0)


def average_pool(draw: Draw) -> tuple[Any, Any]:
    rank = draw.size(1, 3)
    size = [draw.size(1, 4) for _ in range(rank)]
    padding = [draw.size(0, s // 2) for s in size]
    stride, include, last = [draw.size(1, 3) for _ in range(rank)], draw.flag(), draw.flag()
    x = draw.bytes(2, draw.size(1, 20), *[draw.size(4, 11 if rank < 3 else 6) for _ in range(rank)])
    scale, point, end = draw.scale(), draw.point(), draw.point()
    out = draw.scale(scale)
    attributes = {"kernel_shape": size, "strides": stride, "pads": padding * 2, "count_include_pad": int(include)}
    given = np.moveaxis(x, 1, -1).copy() if last else x
    theirs = run("QLinearAveragePool", [given, scale, point, out, end], {**attributes, "channels_last": int(last)})
    pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[rank - 1]
    module = pool(tuple(size), tuple(stride), tuple(padding), count_include_pad=include)
    ours = kernel(f"avg_pool{rank}d", grid(out, end), quantized(x, scale, point), module=module)
    return ours, np.moveaxis(theirs, -1, 1) if last else theirs


def global_average_pool(draw: Draw) -> tuple[Any, Any]:
    sizes = [draw.size(1, 12) for _ in range(draw.size(1, 3))]
    x, last = draw.bytes(2, draw.size(1, 40), *sizes), draw.flag()
    scale, point, end = draw.scale(), draw.point(), draw.point()
    out = draw.scale(scale)
    given = np.moveaxis(x, 1, -1).copy() if last else x
    theirs = run("QLinearGlobalAveragePool", [given, scale, point, out, end], {"channels_last": int(last)})
    ours = kernel("global_average_pool", grid(out, end), quantized(x, scale, point))
    return ours, np.moveaxis(theirs, -1, 1) if last else theirs


def cat(draw: Draw) -> tuple[Any, Any]:
    axis, count = draw.size(0, 2), draw.size(1, 4)
    out, end = draw.scale(), draw.point()
    operands: list[Any] = [out, end]
    parts = []
    for _ in range(count):
        shape = [5, 6, 7]
        shape[axis] = draw.size(1, 9)
        same = draw.flag()
        x, scale, point = draw.bytes(*shape), out if same else draw.scale(out), end if same else draw.point()
        operands += [x, scale, point]
        parts.append(quantized(x, scale, point))
    theirs = run("QLinearConcat", operands, {"axis": axis}, free=tuple(2 + 3 * i for i in range(count)))
    return kernel("cat", grid(out, end), parts, axis), theirs


def leaky_relu(draw: Draw) -> tuple[Any, Any]:
    x, scale, point, end = np.arange(256).astype(np.uint8), draw.scale(), draw.point(), draw.point()
    out, slope = draw.scale(scale), float(np.float32(draw.rng.uniform(0.001, 0.9)))
    theirs = run("QLinearLeakyRelu", [x, scale, point, out, end], {"alpha": slope})
    return kernel("leaky_relu", grid(out, end), quantized(x, scale, point), module=nn.LeakyReLU(slope)), theirs


CASES: dict[str, Callable[[Draw], tuple[Any, Any]]] = {
    case.__name__: case
    for case in (
        *(conv, linear, linear_of_rows, matmul, add, mul),
        *(average_pool, global_average_pool, cat, leaky_relu),
    )
}
