"""STPU: what MQBench's deploy_stpu.py writes for it."""

from collections.abc import Iterator

import numpy as np

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_types, symmetric, tensor_scales
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


register_constraint("stpu-scales", source=_SOURCE)(tensor_scales)


@register_constraint("stpu-concat", source=_SOURCE)
def concat(view: View) -> Iterator[Finding]:
    """What is joined has the range of the result: STPU copies integers."""
    for node in view.operators("Concat"):
        if (result := view.made(node)) is None:
            continue
        for t in (view.read(node, i) for i in range(len(node.input))):
            if t is not None and not np.array_equal(t.scale, result.scale):
                problem = f"joins {t.name}, which has another range than the result"
                yield Finding(view.named(node), problem, "let its inputs and its result share one quantizer")


@register_constraint("stpu-sigmoid", source=_SOURCE)
def sigmoid(view: View) -> Iterator[Finding]:
    """What a Sigmoid makes has the range -1 to 1, or that of a Concat that reads it."""
    for node in view.operators("Sigmoid"):
        made = view.made(node)
        joined = {n.op_type for name in (made.results if made else ()) for n in view.readers.get(name, [])}
        if made is not None and "Concat" not in joined and not np.allclose(made.scale, 1 / 127, rtol=1e-5):
            problem = f"produces {made.name} with the scale {float(np.ravel(made.scale)[0]):.6g}, not 1/127"
            fix = "give it the observer FixedRangeObserver, as the backend does"
            yield Finding(view.named(node), problem, fix)
