"""TensorRT: explicit quantization, as NVIDIA's documentation and Model Optimizer describe it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_types, one_scale, output_channels, positive_scales, symmetric
from bitwright.verification.constraints.view import QuantizedTensor, View

if TYPE_CHECKING:
    import onnx

_DOCS = "docs.nvidia.com/deeplearning/tensorrt, explicit quantization"
_OPTIMIZER = "NVIDIA Model Optimizer, modelopt/onnx/quantization"
_ACTIVATIONS = "int8 symmetric tensor"
_WEIGHTS = "int8 symmetric narrow channel:0"
_FP8 = "float8_e4m3fn"
_ENOUGH = 16  # channels
_OPSETS = {"int8": 13, _FP8: 19, "int4": 21}


@register_constraint("tensorrt-symmetric", source=_DOCS)
def no_zero_points(view: View) -> Iterator[Finding]:
    """Quantization is symmetric: every zero point is 0."""
    yield from symmetric(view, _ACTIVATIONS)


@register_constraint("tensorrt-types", source=_DOCS)
def types(view: View) -> Iterator[Finding]:
    """Tensors are int8 or fp8 (e4m3); int4 is for weights only."""
    yield from of_types(view, "activation", ("int8", _FP8), _ACTIVATIONS)
    yield from of_types(view, "weight", ("int8", "int4", _FP8), _WEIGHTS)


@register_constraint("tensorrt-bias", source="onnx/onnx-tensorrt issue 850, NVIDIA/TensorRT issue 3360")
def biases(view: View) -> Iterator[Finding]:
    """Biases are float: TensorRT's parser refuses to dequantize int32."""
    for t in view.of_kind("bias"):
        yield Finding(t.name, f"is stored as {t.type}", "use a backend with integer_bias: false, as tensorrt is")


@register_constraint("tensorrt-scales", source=_DOCS)
def scales(view: View) -> Iterator[Finding]:
    """Scales are positive constants; computed tensors have one, weights one or one for each output channel."""
    yield from positive_scales(view)
    yield from one_scale(view, "activation")
    yield from output_channels(view, blocks=True)


@register_constraint("tensorrt-blocks", source=_DOCS)
def blocks(view: View) -> Iterator[Finding]:
    """Blocks of values with a scale are for int4 weights only."""
    for t in view.tensors:
        if t.block is not None and t.type != "int4":
            yield Finding(t.name, f"is {t.type} with a scale for each block", "ask for int4 weights, or for channels")


@register_constraint("tensorrt-opset", source=_DOCS)
def opset(view: View) -> Iterator[Finding]:
    """The file's opset is one with the types that it uses: 13 for int8, 19 for fp8, 21 for int4."""
    for t in view.tensors:
        if view.opset < (least := _OPSETS.get(t.type, 0)):
            yield Finding(t.name, f"is {t.type}, which needs opset {least}, not {view.opset}", "export again")
            return


@register_constraint("tensorrt-layers", source=_OPTIMIZER)
def layers(view: View) -> Iterator[Finding]:
    """A layer with an int8 or fp8 weight reads a quantized tensor, or it runs in float."""
    for node in view.operators("Conv", "ConvTranspose", "Gemm", "MatMul"):
        weight = view.read(node, 1)
        if weight is not None and weight.kind == "weight" and weight.type != "int4" and view.read(node, 0) is None:
            yield Finding(view.named(node), "has a quantized weight and a float input", "quantize its input, too")


@register_constraint("tensorrt-residual", source="NVIDIA/TensorRT, add_custom_qdq_cases.md")
def residual(view: View) -> Iterator[Finding]:
    """In a sum with a convolution, Q/DQ is on the other branch only: between Conv and Add it stops their fusion."""
    for node in view.operators("Add"):
        if len(node.input) != 2 or any(_only_reader(view, name) for name in node.input):
            continue
        found = [t for i in (0, 1) if (t := view.read(node, i)) is not None and _fusable(view, t)]
        if found:
            layer = view.named(view.makers[found[0].source])
            problem = f"reads the result of {layer} through Q/DQ, which stops TensorRT from fusing the two"
            fix = "leave that result float: a rule for the layer with output: float"
            yield Finding(view.named(node), problem, fix)


def _only_reader(view: View, name: str) -> bool:
    """Whether a tensor is a convolution's result, with the norm after it, that goes nowhere else."""
    while len(view.readers.get(name, [])) == 1 and name not in view.outputs:
        maker = view.makers.get(name)
        if maker is None or maker.op_type != "BatchNormalization":
            return maker is not None and maker.op_type == "Conv"
        name = maker.input[0]
    return False


def _fusable(view: View, t: QuantizedTensor) -> bool:
    """Whether a quantized tensor is a convolution's result that only one operator reads."""
    readers = [node for name in t.results for node in view.readers.get(name, [])]
    return _only_reader(view, t.source) and len(readers) == 1


@register_constraint("tensorrt-shapes", source=_OPTIMIZER, advice=True)
def shapes(view: View) -> Iterator[Finding]:
    """Small layers are faster in float: Model Optimizer leaves convolutions and products below 16 channels alone."""
    for node in view.operators("Conv", "Gemm", "MatMul"):
        weight = view.read(node, 1)
        sizes = view.shapes.get(weight.results[0], []) if weight is not None and weight.kind == "weight" else []
        if sizes and None not in sizes and (why := _too_small(view, node, [s or 0 for s in sizes])):
            fix = "leave it float with --skip or a rule, and see which is faster"
            yield Finding(view.named(node), f"{why}, which Model Optimizer leaves float", fix)


def _too_small(view: View, node: "onnx.NodeProto", sizes: list[int]) -> str:
    """What is small about a layer, by the sizes of its weight; empty if nothing is."""
    if node.op_type != "Conv":
        return f"multiplies by a matrix of {sizes}" if min(sizes) < _ENOUGH else ""
    groups = int(view.setting(node, "group", 1))
    results, channels, kernel = sizes[0], sizes[1] * groups, sizes[2:]
    if groups > 1:
        fits = results % 8 == 0 and min(kernel) >= 3
    else:
        even = channels % 8 == 0 or results % 8 == 0
        first = node.input[0] in view.inputs
        fits = even and (first or max(results, channels) >= _ENOUGH) and len(set(kernel)) == 1
    return "" if fits or min(results, channels) >= _ENOUGH else f"has {channels} input and {results} output channels"
