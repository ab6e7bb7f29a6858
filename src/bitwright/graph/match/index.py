"""GraphIndex: the nodes of a graph by what they call, so that a pattern looks only where it could match."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.match.inputs import inputs_of
from bitwright.graph.match.node import Kind, MatcherNode
from bitwright.graph.names import attribute_of
from bitwright.nn.operators import is_kept_whole, operator_of, operator_of_module
from bitwright.nn.registry import QMODULES


class GraphIndex:
    """What every node of a model's graph calls, and its inputs; call ``update`` after changing the graph."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        self.position: dict[fx.Node, int] = {}
        self._stands_for = _sources()
        self._kinds_made: dict[tuple[Any, ...], Kind] = {}
        self._entries: dict[fx.Node, tuple[Kind, Any]] = {}
        self._inputs: dict[fx.Node, tuple[Any, Any, tuple[fx.Node, ...]]] = {}
        self._by_kind: dict[Kind, list[fx.Node]] = {}
        self.update()

    def update(self) -> None:
        """Look at the whole graph again."""
        self.position = {node: i for i, node in enumerate(self.model.graph.nodes)}
        before, self._entries, self._by_kind = self._entries, {}, {}
        for node in self.position:
            kind = self._look_at(node, before.get(node))[0]
            self._by_kind.setdefault(kind, []).append(node)

    def refresh(self, nodes: Iterable[fx.Node]) -> None:
        """Look at some nodes again, without changing what ``candidates`` returns."""
        for node in nodes:
            self._look_at(node)

    def knows(self, node: fx.Node) -> bool:
        """Whether a node existed at the last update, or was refreshed since."""
        return node in self._entries

    def kind(self, node: fx.Node) -> Kind:
        """What a node calls."""
        return (self._entries.get(node) or self._look_at(node))[0]

    def instance(self, node: fx.Node) -> Any:
        """The module or function that a node calls, or the parameter it reads."""
        return (self._entries.get(node) or self._look_at(node))[1]

    def inputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The inputs of a node, in order and with repetitions."""
        known = self._inputs.get(node)
        if known is None or known[0] is not node.args or known[1] is not node.kwargs:
            known = self._inputs[node] = (node.args, node.kwargs, inputs_of(node, self.instance(node)))
        return known[2]

    def count(self, wanted: MatcherNode) -> int:
        """How many nodes have a target that ``wanted`` allows."""
        return sum(len(nodes) for kind, nodes in self._by_kind.items() if wanted.may_be(kind))

    def candidates(self, wanted: MatcherNode) -> list[fx.Node]:
        """The nodes with a target that ``wanted`` allows, in the graph's order."""
        found = [node for kind, nodes in self._by_kind.items() if wanted.may_be(kind) for node in nodes]
        return sorted(found, key=self.position.__getitem__)

    def _look_at(self, node: fx.Node, before: tuple[Kind, Any] | None = None) -> tuple[Kind, Any]:
        instance = instance_of(node, self.model)
        if before is not None and before[1] is instance and before[0].thing in (type(instance), node.target):
            self._entries[node] = before
            return before
        what = _what_is_called(node, instance)
        if what not in self._kinds_made:
            self._kinds_made[what] = Kind(*what, self._stands_for.get(what[1], ()))
        entry = self._entries[node] = (self._kinds_made[what], instance)
        return entry


def instance_of(node: fx.Node, model: nn.Module) -> Any:
    """The module, function or tensor method that a node calls, or the parameter it reads; else None."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "get_attr":
        return attribute_of(model, str(node.target))
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


def _what_is_called(node: fx.Node, instance: Any) -> tuple[str, Any, str]:
    """A node's op, its target, and the name of the operator."""
    if node.op == "call_module":
        if is_kept_whole(instance):
            return node.op, nn.Module, ""
        operator = operator_of_module(instance)
        return node.op, type(instance), operator.name if operator else ""
    if node.op == "get_attr":
        return node.op, type(instance), ""
    if node.op in ("call_function", "call_method"):
        operator = operator_of(node, {})
        return node.op, node.target, operator.name if operator else ""
    return node.op, None, ""


def _sources() -> dict[Any, tuple[type, ...]]:
    """Each QModule with the module classes it serves, and each target that stays with the QModule that serves it."""
    served: defaultdict[Any, list[type]] = defaultdict(list)
    for source, cls in QMODULES.items():
        if isinstance(source, type):
            served[cls].append(source)
        if getattr(cls, "gives_way", False):
            served[source].append(cls)
    return {thing: tuple(classes) for thing, classes in served.items()}
