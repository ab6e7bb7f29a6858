"""Qualcomm SNPE and QNN: what encodings can say, as AIMET's specification and its issues tell."""

from collections.abc import Iterator

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_bits, one_scale, output_channels, positive_scales
from bitwright.verification.constraints.view import LAYERS, View

_SPEC = "quic.github.io/aimet-pages, encoding specification"
_OLD = "qualcomm-0.6.1"


@register_constraint("qualcomm-bits", source=_SPEC)
def bits(view: View) -> Iterator[Finding]:
    """Encodings have 4 to 32 bits in version 0.6.1, and 2 to 32 in later ones."""
    allowed = range(4 if view.format == _OLD else 2, 33)
    yield from of_bits(view, "activation", allowed, "uint8 affine tensor")
    yield from of_bits(view, "weight", allowed, "uint8 affine tensor")


@register_constraint("qualcomm-scales", source=_SPEC)
def scales(view: View) -> Iterator[Finding]:
    """Computed tensors have one encoding; weights have one, or one for each output channel."""
    yield from positive_scales(view)
    yield from one_scale(view, "activation")
    yield from output_channels(view, blocks=view.format != _OLD)


@register_constraint("qualcomm-zero", source=_SPEC)
def zero(view: View) -> Iterator[Finding]:
    """Offsets are whole and from -(2**bits - 1) to 0, so that 0.0 is one of the integers."""
    for t in view.of_kind("activation", "weight"):
        lowest = -(2 ** (t.bits - 1)) if not t.type.startswith("uint") else 0
        if (t.zero_point < lowest).any() or (t.zero_point > lowest + 2**t.bits - 1).any():
            problem = f"has a zero point outside of its {t.bits} bits"
            yield Finding(t.name, problem, "make its range include 0, as every observer does")


@register_constraint("qualcomm-bias", source="qualcomm/aimet issue 4090")
def biases(view: View) -> Iterator[Finding]:
    """In version 2.0.0 a bias beside a quantized weight has an int32 encoding, or its layer turns float."""
    encoded = {name for t in view.of_kind("bias") for name in t.results}
    for node in view.operators(*LAYERS) if view.format == "qualcomm-2.0.0" else ():
        weight, bias = view.read(node, 1), view.bias(node)
        if weight is not None and weight.kind == "weight" and bias and bias not in encoded:
            fix = "export a version before 2.0.0, or quantize its input: integer biases need both scales"
            yield Finding(view.named(node), "has a bias without an int32 encoding", fix)


@register_constraint("qualcomm-gaps", source="qualcomm/aimet discussion 3902")
def gaps(view: View) -> Iterator[Finding]:
    """What a layer with an encoded weight reads and makes has an encoding, or the converter makes one up."""
    for node in view.operators(*LAYERS):
        weight = view.read(node, 1)
        if weight is None or weight.kind != "weight":
            continue
        missing = [] if view.read(node, 0) is not None else ["input"]
        missing += [] if view.made(node) is not None else ["result"]
        if missing:
            problem = f"has an encoded weight, but no encoding for its {' and '.join(missing)}"
            yield Finding(view.named(node), problem, "quantize it, too, or leave the weight float")
