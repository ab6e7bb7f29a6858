"""What the constraints of several targets look at: types, zero points, and where scales lie."""

from collections.abc import Collection, Iterator

import numpy as np

from bitwright.verification.constraints.base import Finding
from bitwright.verification.constraints.view import QuantizedTensor, View

BOTH = ("activation", "weight")


def of_types(view: View, kind: str, types: Collection[str], spec: str) -> Iterator[Finding]:
    """Tensors of a kind whose integers have another type; ``spec`` is what to ask for instead."""
    for t in view.of_kind(kind):
        if t.type not in types:
            yield Finding(t.name, f"is {t.type}, not {' or '.join(sorted(types))}", _ask(kind, spec))


def of_bits(view: View, kind: str, bits: Collection[int], spec: str) -> Iterator[Finding]:
    """Tensors of a kind that use another number of bits."""
    allowed = f"{min(bits)} to {max(bits)}" if len(bits) > 2 else " or ".join(map(str, sorted(bits)))
    for t in view.of_kind(kind):
        if t.bits not in bits:
            yield Finding(t.name, f"has {t.bits} bits, not {allowed}", _ask(kind, spec))


def symmetric(view: View, spec: str) -> Iterator[Finding]:
    """Tensors with a zero point, or with unsigned integers."""
    for t in view.of_kind(*BOTH):
        if t.zero_point.any():
            yield Finding(t.name, f"has the zero point {int(np.ravel(t.zero_point)[0])}, not 0", _ask(t.kind, spec))
        elif t.type.startswith("uint"):
            yield Finding(t.name, f"is {t.type}, which has no negative integers", _ask(t.kind, spec))


def one_scale(view: View, kind: str) -> Iterator[Finding]:
    """Tensors of a kind with several scales."""
    for t in view.of_kind(kind):
        if not t.per_tensor:
            yield Finding(t.name, f"has {_scales(t)}, not one", f"ask for {kind}s with the granularity 'tensor'")


def output_channels(view: View, *, blocks: bool = False) -> Iterator[Finding]:
    """Weights whose scales lie along another axis than the output channels."""
    for t in view.of_kind("weight"):
        if t.per_tensor or (blocks and t.block is not None):
            continue
        if t.block is not None:
            yield Finding(t.name, f"has {_scales(t)}", "ask for weights with the granularity 'channel:0' or 'tensor'")
        elif view.output_axes(t) and t.axis not in view.output_axes(t):
            axes = " or ".join(map(str, sorted(view.output_axes(t))))
            problem = f"has scales along axis {t.axis}; the output channels are axis {axes}"
            yield Finding(t.name, problem, "ask for weights with the granularity 'channel:0', or 'tensor'")


def positive_scales(view: View) -> Iterator[Finding]:
    """Tensors whose scales are missing, negative, zero or not finite."""
    for t in view.tensors:
        if not (np.isfinite(t.scale).all() and (t.scale > 0).all()):
            yield Finding(t.name, "has a scale that is not a positive constant", "calibrate the model and export again")


def tensor_scales(view: View) -> Iterator[Finding]:
    """Every tensor has one scale."""
    yield from positive_scales(view)
    yield from one_scale(view, "activation")
    yield from one_scale(view, "weight")


def channel_scales(view: View) -> Iterator[Finding]:
    """Computed tensors have one scale; weights have one, or one for each output channel."""
    yield from positive_scales(view)
    yield from one_scale(view, "activation")
    yield from output_channels(view)


def _scales(t: QuantizedTensor) -> str:
    return f"{t.scale.size} scales" if t.block is None else f"a scale for each block of {t.block} values"


def _ask(kind: str, spec: str) -> str:
    return f"ask for {kind}s as '{spec}'"
