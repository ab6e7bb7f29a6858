"""Whether two results are the same, bit for bit, and where two models part."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.capture.failures import boundary, call_model
from bitwright.graph.inputs import Inputs, bind_inputs
from bitwright.graph.model import CapturedModel


def same(a: Any, b: Any) -> bool:
    """Whether two results of any nesting agree bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _equal_tensors(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return same(vars(a), vars(b))
    return _equal_objects(a, b)


@boundary
def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


@boundary
def _equal_objects(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))  # NaN equals NaN here


def first_deviation(captured: nn.Module, root: nn.Module, inputs: Inputs) -> str:
    """The first call in a graph that gives something else than the same call in the original."""
    if not isinstance(captured, CapturedModel):
        return "inside an island"
    seen: dict[str, list[Any]] = {}
    handles = [
        m.register_forward_hook(lambda _m, _a, out, path=path: seen.setdefault(path, []).append(copy.deepcopy(out)))
        for path, m in root.named_modules()
        if path
    ]
    try:
        values = copy.deepcopy(inputs)
        call_model(root, *values.args, **values.kwargs)
    finally:
        for handle in handles:
            handle.remove()

    class Compare(fx.Interpreter):
        first = ""

        def run_node(self, n: fx.Node) -> Any:
            out = call_model(super().run_node, n)
            calls = seen.get(str(n.target)) if n.op == "call_module" else None
            if calls and not self.first and not same(out, calls.pop(0)):
                self.first = f"{n.name!r} ({n.target})"
            return out

    compare = Compare(captured)
    values = copy.deepcopy(inputs)
    compare.run(*bind_inputs(root, values.args, values.kwargs).values())
    return compare.first or "a function between modules"
