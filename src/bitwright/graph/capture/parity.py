"""Find where a graph and the model it was captured from diverge."""

import copy
from typing import Any

from torch import fx, nn

from bitwright.graph.capture.failures import call_model
from bitwright.graph.differences import difference
from bitwright.graph.inputs import Inputs, bind_inputs
from bitwright.graph.model import CapturedModel


def first_deviation(captured: nn.Module, root: nn.Module, inputs: Inputs) -> str:
    """The first call in a graph whose result differs from the same call in the original."""
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
            if calls and not self.first and difference(out, calls.pop(0)):
                self.first = f"{n.name!r} ({n.target})"
            return out

    compare = Compare(captured)
    values = copy.deepcopy(inputs)
    compare.run(*bind_inputs(root, values.args, values.kwargs).values())
    return compare.first or "a function between modules"
