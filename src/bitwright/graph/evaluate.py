"""The evaluator: compute a node's value from parameters and buffers, from given values, or on zeros."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.effects import is_pure
from bitwright.graph.facts import facts
from bitwright.graph.names import attribute_of
from bitwright.modes import eval_mode


def call_target(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function, or a method of ``args[0]`` by name."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


class Evaluator:
    """Computes each node once from known values; raises LookupError if a node depends on an input of the model."""

    def __init__(self, model: nn.Module, values: Mapping[fx.Node, Any] | None = None) -> None:
        self.model = model
        self.values: dict[fx.Node, Any] = dict(values or {})

    def __call__(self, node: fx.Node) -> Any:
        if node not in self.values:
            self.values[node] = self.compute(node)
        return self.values[node]

    def compute(self, node: fx.Node) -> Any:
        """Call what a node calls, with the values of its inputs."""
        if node.op in ("placeholder", "output"):
            raise LookupError(f"the value of {node.name} is not known before the model runs")
        if node.op == "get_attr":
            return attribute_of(self.model, str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self)
        if node.op != "call_module":
            return call_target(node.target, args, kwargs)
        module = self.model.get_submodule(str(node.target))
        with eval_mode(module):
            return module(*args, **kwargs)


class ZerosEvaluator(Evaluator):
    """Computes nodes as if every tensor that capture saw were zero, which yields the right shapes and types.

    It uses zeros because the meta device takes a second to load.
    """

    def __call__(self, node: fx.Node) -> Any:
        info = facts(node).tensor
        if node not in self.values and info is not None:
            device = next(self.model.parameters(), torch.empty(0)).device
            self.values[node] = torch.zeros(info.shape, dtype=info.dtype, device=device)
        elif node not in self.values and not is_pure(node, self.model):
            raise LookupError(f"{node.name} may do more than compute a value")
        return super().__call__(node)

    def compute(self, node: fx.Node) -> Any:
        with torch.no_grad():
            return super().compute(node)
