"""GraphIndex: the nodes of a graph by what they call, so that a pattern looks only where it could match."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.match.inputs import inputs_of
from bitwright.graph.match.node import Kind, MatcherNode
from bitwright.graph.names import attribute_of
from bitwright.nn.operators import operator_of, operator_of_module
from bitwright.nn.registry import QMODULES


class GraphIndex:
    """What every node of a model's graph calls, and what goes into it; valid until the graph is changed."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        self.position = {node: i for i, node in enumerate(model.graph.nodes)}
        self._stands_for = _sources()
        self._instances: dict[fx.Node, Any] = {}
        self._inputs: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._kinds: dict[fx.Node, Kind] = {}
        self._by_kind: defaultdict[Kind, list[fx.Node]] = defaultdict(list)
        self.refresh(self.position)
        for node, kind in self._kinds.items():
            self._by_kind[kind].append(node)

    def refresh(self, nodes: Iterable[fx.Node]) -> None:
        """Look at some nodes again, after a change of the graph; it changes nothing in what ``candidates`` returns."""
        for node in nodes:
            self._inputs.pop(node, None)
            instance = self._instances[node] = instance_of(node, self.model)
            self._kinds[node] = _kind_of(node, instance, self._stands_for)

    def knows(self, node: fx.Node) -> bool:
        """Whether a node was there when the index was made, or has been shown to it since."""
        return node in self._kinds

    def kind(self, node: fx.Node) -> Kind:
        """What a node calls."""
        if node not in self._kinds:
            self.refresh([node])
        return self._kinds[node]

    def instance(self, node: fx.Node) -> Any:
        """The module or function that a node calls, or the parameter it reads."""
        return self._instances[node]

    def inputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What goes into a node, in order and with repetitions."""
        if node not in self._inputs:
            self._inputs[node] = inputs_of(node, self._instances[node])
        return self._inputs[node]

    def candidates(self, wanted: MatcherNode) -> list[fx.Node]:
        """The nodes that call what ``wanted`` may be, in the graph's order."""
        found = [node for kind, nodes in self._by_kind.items() if wanted.may_be(kind) for node in nodes]
        return sorted(found, key=self.position.__getitem__)


def instance_of(node: fx.Node, model: nn.Module) -> Any:
    """The module, function or tensor method that a node calls, or the parameter it reads; else None."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "get_attr":
        return attribute_of(model, str(node.target))
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def _kind_of(node: fx.Node, instance: Any, stands_for: dict[type, tuple[type, ...]]) -> Kind:
    if node.op == "call_module":
        operator, cls = operator_of_module(instance), type(instance)
        return Kind(node.op, cls, operator.name if operator else "", stands_for.get(cls, ()))
    if node.op == "get_attr":
        return Kind(node.op, type(instance))
    if node.op in ("call_function", "call_method"):
        operator = operator_of(node, {})
        return Kind(node.op, node.target, operator.name if operator else "")
    return Kind(node.op)


def _sources() -> dict[type, tuple[type, ...]]:
    """Each QModule with the module classes that it serves."""
    served: defaultdict[type, list[type]] = defaultdict(list)
    for source, cls in QMODULES.items():
        if isinstance(source, type):
            served[cls].append(source)
    return {cls: tuple(sources) for cls, sources in served.items()}
