"""Which specs a target has: formats, granularities and schemes, and the sentence that says which one it lacks."""

from collections.abc import Iterable
from typing import Literal

from bitwright.spec import PerChannel, PerTensor, QuantSpec

Grain = Literal["tensor", "channel", "group"]
Scheme = Literal["symmetric", "affine"]
Kind = Literal["weights", "activations"]


def grain(spec: QuantSpec) -> Grain:
    """The granularity of a spec in one word."""
    if isinstance(spec.granularity, PerTensor):
        return "tensor"
    return "channel" if isinstance(spec.granularity, PerChannel) else "group"


def why_not(
    spec: QuantSpec, kind: Kind, formats: frozenset[str], grains: frozenset[Grain], schemes: frozenset[Scheme]
) -> str | None:
    """What is wrong with a spec, to be said after the target's name; nothing in ``formats`` means any."""
    if formats and spec.format.name not in formats:
        return f"has no {kind} in {spec.format}; it has {_listed(formats)}"
    if grain(spec) not in grains:
        if kind == "activations" and grains == {"tensor"}:
            return f"needs one scale per activation tensor, not '{spec}'"
        return f"has no scales per {grain(spec)} for {kind} ('{spec}'); it has them per {_listed(grains, ' and per ')}"
    scheme: Scheme = "symmetric" if spec.symmetric else "affine"
    if scheme not in schemes:
        return f"needs {_listed(schemes, ' or ')} {kind}, not '{spec}'"
    return None


def _listed(names: Iterable[str], between: str = ", ") -> str:
    return between.join(sorted(names))
