"""ONNX's QLinear operators: what the specification of QLinearConv and its like demands."""

from collections.abc import Iterator

import numpy as np

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import channel_scales, of_types
from bitwright.verification.constraints.view import View

_SOURCE = "onnx.ai, QLinearConv and com.microsoft QLinearAdd"
_SPEC = "uint8 affine tensor"
_OPERATORS = ("Conv", "Add", "AveragePool", "GlobalAveragePool")


@register_constraint("qlinear-types", source=_SOURCE)
def types(view: View) -> Iterator[Finding]:
    """Weights and computed tensors have 8 bits, a bias 32."""
    yield from of_types(view, "activation", ("int8", "uint8"), _SPEC)
    yield from of_types(view, "weight", ("int8", "uint8"), _SPEC)
    yield from of_types(view, "bias", ("int32",), "int32")


register_constraint("qlinear-scales", source=_SOURCE)(channel_scales)


@register_constraint("qlinear-bias", source=_SOURCE)
def bias(view: View) -> Iterator[Finding]:
    """The scale of a convolution's bias is that of its input times that of its weight."""
    for node in view.operators("Conv"):
        found = [view.read(node, i) for i in (0, 1, 2)]
        if None in found:
            continue
        given, weight, own = (t.scale.astype(np.float64) for t in found if t is not None)
        if not np.allclose(np.ravel(own), np.ravel(given * weight), rtol=1e-5):
            yield Finding(view.named(node), "has a bias in steps other than input scale × weight scale", "export again")


@register_constraint("qlinear-results", source=_SOURCE)
def results(view: View) -> Iterator[Finding]:
    """An operator that reads quantized tensors only has a quantized result: QLinear operators give integers."""
    for node in view.operators(*_OPERATORS):
        reads = [view.read(node, i) for i in range(1 if node.op_type != "Add" else 2)]
        if None not in reads and view.made(node) is None:
            yield Finding(view.named(node), "reads integers and returns floats", "quantize its result, too")
