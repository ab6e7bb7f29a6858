"""NodeBuilder: add nodes to a graph, with the facts that capture would have noted (shape, dtype, scope)."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn

from bitwright.graph.effects import has_effect
from bitwright.graph.evaluate import ZerosEvaluator
from bitwright.graph.facts import facts, has_facts, set_facts, set_value, user_name
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import add_internal, node_name

_UNKNOWN = object()


class NodeBuilder:
    """Adds nodes before a given one, whose place they will take.

    With ``splits``, they are parts of what ``before`` computes, which users know by its name.
    """

    def __init__(
        self, model: CapturedModel, before: fx.Node, scope: str | None = None, *, splits: bool = False
    ) -> None:
        self.model = model
        self.before = before
        self.scope = facts(before).scope if scope is None else scope
        self._replaces = (node_name(before),)
        self._origin = facts(before).origin or before.name
        self._whole = user_name(before) if splits else ""
        self._evaluate = ZerosEvaluator(model)

    def function(
        self,
        target: Callable[..., Any],
        *args: object,
        name: str | None = None,
        like: fx.Node | None = None,
        **kwargs: object,
    ) -> fx.Node:
        """Call a function; with ``like``, a node with a result of the same shape and type, it is not run."""
        return self._add("call_function", target, args, kwargs, name, like)

    def method(self, target: str, *args: object, name: str | None = None, **kwargs: object) -> fx.Node:
        """Call a method of a tensor, the first of ``args``."""
        return self._add("call_method", target, args, kwargs, name)

    def module(
        self, module: nn.Module, *args: object, name: str, like: fx.Node | None = None, **kwargs: object
    ) -> fx.Node:
        """Add a module without state to the model, and call it.

        ``like`` is a node with a result of the same shape and type, if that is known: the module is not run then.
        """
        target = add_internal(self.model, "parts", name, module.train(self.model.training))
        return self._add("call_module", target, args, kwargs, name, like)

    def attribute(self, target: str) -> fx.Node:
        """Read a parameter or buffer."""
        return self._add("get_attr", target, (), {}, None)

    def _add(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
        like: fx.Node | None = None,
    ) -> fx.Node:
        with self.model.graph.inserting_before(self.before):
            node = self.model.graph.create_node(op, target, args, kwargs, name)
        set_facts(node, scope=self.scope, replaces=self._replaces, origin=self._origin, part_of=self._whole)
        if like is None:
            value = self._evaluate.values[node] = self._evaluate.compute(node)
            set_value(node, value)
        else:
            set_facts(node, tensor=facts(like).tensor, plain=facts(like).plain)
        return node


def describe_new(model: fx.GraphModule, nodes: Iterable[fx.Node], scope: str, replaces: tuple[str, ...]) -> None:
    """Set the facts of a schedule's new nodes, in the order of computation, as capture would have set them."""
    evaluate = ZerosEvaluator(model)
    for node in nodes:
        if not has_facts(node):
            set_value(node, _value_if_known(evaluate, node), scope=scope)
        if facts(node).replaces != replaces:
            set_facts(node, replaces=replaces)


def _value_if_known(evaluate: ZerosEvaluator, node: fx.Node) -> Any:
    if has_effect(node, evaluate.model):
        return _UNKNOWN
    try:
        value = evaluate.values[node] = evaluate.compute(node)
    except Exception:  # if an operator rejects zeros for whatever reason, nothing is known
        return _UNKNOWN
    return value


def argument(node: fx.Node, position: int, name: str, default: object = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)


def replace(node: fx.Node, by: object) -> None:
    """Make all users of a node read another node, a value or a tuple of nodes, and remove the node from its graph."""
    for user in list(node.users):
        put_in_place(user, node, by)
    node.graph.erase_node(node)


def put_in_place(user: fx.Node, old: fx.Node, by: Any) -> None:
    """Make one node read something else instead of ``old``."""
    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: by if n is old else n)
