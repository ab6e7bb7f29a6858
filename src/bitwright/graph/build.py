"""NodeBuilder: adds nodes to a graph with the notes on them that capture makes: shape, dtype and scope."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.facts import facts, set_value
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import attribute_of, free_name


class NodeBuilder:
    """Adds nodes before a given one, in the place of which they will stand.

    The shapes are found by running each call on zeros, as the device without data takes a second to be loaded.

    Args:
        model: the model whose graph is extended.
        before: the node that the new ones come before.
        scope: the module that the new nodes belong to; that of ``before`` where it is not given.
    """

    def __init__(self, model: CapturedModel, before: fx.Node, scope: str | None = None) -> None:
        self.model = model
        self.before = before
        self.scope = facts(before).scope if scope is None else scope
        self._values: dict[fx.Node, Any] = {}

    def function(self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """Call a function."""
        return self._add("call_function", target, args, kwargs, name)

    def method(self, target: str, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """Call a method of a tensor, the first of ``args``."""
        return self._add("call_method", target, args, kwargs, name)

    def module(self, target: str, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """Call a submodule without parameters."""
        return self._add("call_module", target, args, kwargs, name)

    def attribute(self, target: str) -> fx.Node:
        """Read a parameter or buffer."""
        return self._add("get_attr", target, (), {}, None)

    def new_module(self, wish: str, module: nn.Module) -> str:
        """Add a module without state under the name wished for, or one like it that is free; return the name."""
        parent_name, _, last = wish.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        free = free_name(parent, last)
        parent.add_module(free, module.train(parent.training))
        return f"{parent_name}.{free}".lstrip(".")

    def _add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None) -> fx.Node:
        with self.model.graph.inserting_before(self.before):
            node = self.model.graph.create_node(op, target, args, kwargs, name)
        with torch.no_grad():
            value = self._values[node] = self._evaluate(op, target, args, kwargs)
        set_value(node, value, scope=self.scope)
        return node

    def _evaluate(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op == "get_attr":
            return attribute_of(self.model, target)
        given, named = fx.node.map_arg((args, kwargs), self._value)
        if op == "call_method":
            return getattr(given[0], target)(*given[1:], **named)
        call = self.model.get_submodule(target) if op == "call_module" else target
        return call(*given, **named)

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            info = facts(node).tensor
            if info is None:
                raise ValueError(f"{node.name} is no tensor, and its value is not known")
            device = next(self.model.parameters(), torch.empty(0)).device
            self._values[node] = torch.zeros(info.shape, dtype=info.dtype, device=device)
        return self._values[node]


def module_of(node: object, model: nn.Module) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    return model.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks: what they look at must stay."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def replace(node: fx.Node, by: Any) -> None:
    """Let all users of a node read something else, and take the node out of its graph.

    Args:
        node: the node to be replaced.
        by: another node, or a value or tuple of nodes that stands in its place among the arguments.
    """
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda n: by if n is node else n)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda n: by if n is node else n)
    node.graph.erase_node(node)
