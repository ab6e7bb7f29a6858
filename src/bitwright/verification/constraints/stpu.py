"""STPU: what MQBench's deploy_stpu.py writes for it."""

from collections.abc import Iterator

import numpy as np

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_types, one_scale, positive_scales, symmetric
from bitwright.verification.constraints.view import View

_SOURCE = "ModelTC/MQBench, deploy_stpu.py"
_SPEC = "int8 symmetric narrow tensor"


@register_constraint("stpu-symmetric", source=_SOURCE)
def no_zero_points(view: View) -> Iterator[Finding]:
    """Ranges are symmetric: integers are signed, and 0 stands for 0."""
    yield from symmetric(view, _SPEC)


@register_constraint("stpu-types", source=_SOURCE)
def types(view: View) -> Iterator[Finding]:
    """Weights and computed tensors are int8."""
    yield from of_types(view, "activation", ("int8",), _SPEC)
    yield from of_types(view, "weight", ("int8",), _SPEC)


@register_constraint("stpu-scales", source=_SOURCE)
def scales(view: View) -> Iterator[Finding]:
    """Every tensor has one scale."""
    yield from positive_scales(view)
    yield from one_scale(view, "activation")
    yield from one_scale(view, "weight")


@register_constraint("stpu-concat", source=_SOURCE)
def concat(view: View) -> Iterator[Finding]:
    """What is joined has the range of the result: STPU copies integers."""
    for node in view.operators("Concat"):
        if (result := view.made(node)) is None:
            continue
        for t in (view.read(node, i) for i in range(len(node.input))):
            if t is not None and not np.array_equal(t.scale, result.scale):
                problem = f"joins {t.name}, whose range is not that of the result"
                yield Finding(view.named(node), problem, "let its inputs and its result share one quantizer")
