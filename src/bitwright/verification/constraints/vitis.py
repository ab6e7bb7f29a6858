"""Vitis AI: what a DPU computes with, as vai_q_pytorch (nndct_shared) checks it."""

from collections.abc import Iterator

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_types, symmetric, tensor_scales
from bitwright.verification.constraints.view import LAYERS, View

_SOURCE = "Xilinx/Vitis-AI, vai_q_pytorch/nndct_shared"
_SPEC = "int8 symmetric pot tensor"
_MOST_SHIFT = 16


@register_constraint("vitis-symmetric", source=_SOURCE)
def no_zero_points(view: View) -> Iterator[Finding]:
    """Integers are signed, and 0 stands for 0."""
    yield from symmetric(view, _SPEC)


@register_constraint("vitis-types", source=_SOURCE)
def types(view: View) -> Iterator[Finding]:
    """Weights and computed tensors are int8."""
    yield from of_types(view, "activation", ("int8",), _SPEC)
    yield from of_types(view, "weight", ("int8",), _SPEC)


register_constraint("vitis-scales", source=_SOURCE)(tensor_scales)


@register_constraint("vitis-power-of-two", source=_SOURCE)
def powers_of_two(view: View) -> Iterator[Finding]:
    """Every scale is a power of two, 2**-f for a fix position f: a DPU shifts, it does not multiply."""
    for t in view.tensors:
        if t.per_tensor and t.position is None:
            problem = f"has the scale {float(t.scale.reshape(())):.6g}, not a power of two"
            yield Finding(t.name, problem, f"ask for '{_SPEC}'")


@register_constraint("vitis-shift", source=f"{_SOURCE}, fix_pos_adjust.py")
def shifts(view: View) -> Iterator[Finding]:
    """A layer's sums are shifted right by 0 to 16 bits: 0 ≤ weight + input - output position ≤ 16."""
    for node in view.operators(*LAYERS):
        tensors = (view.read(node, 1), view.read(node, 0), view.made(node))
        positions = [t.position if t is not None else None for t in tensors]
        if None in positions:
            continue
        weight, given, made = (p or 0 for p in positions)
        shift = weight + given - made
        if not 0 <= shift <= _MOST_SHIFT:
            problem = f"shifts its sums by {weight} + {given} - {made} = {shift} bits, not by 0 to {_MOST_SHIFT}"
            fix = f"give its result the fix position {min(max(made, weight + given - _MOST_SHIFT), weight + given)}"
            yield Finding(view.named(node), problem, fix)


@register_constraint("vitis-operands", source=_SOURCE, advice=True)
def operands(view: View) -> Iterator[Finding]:
    """What a layer on the DPU reads and makes has a fix position; the compiler chooses those that are missing."""
    positions = {name for t in view.tensors for name in t.results}
    for node in view.operators(*LAYERS):
        if (weight := view.read(node, 1)) is None or weight.kind != "weight":
            continue
        missing = [] if view.read(node, 0) is not None else ["its input"]
        missing += ["its bias"] if (bias := view.bias(node)) and bias not in positions else []
        missing += [] if view.made(node) is not None else ["its result"]
        if missing:
            problem = f"has no fix position for {' and '.join(missing)}"
            yield Finding(view.named(node), problem, "Vitis AI chooses one: check it in the compiled model")
