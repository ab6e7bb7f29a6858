"""What is known of a new node: its scope, and the shape and type of its tensor, found by computing it on zeros."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.effects import has_effect, is_pure
from bitwright.graph.facts import facts, has_facts, set_facts, set_value
from bitwright.graph.match.index import instance_of
from bitwright.modes import eval_mode

_UNKNOWN = object()


def describe_new(model: fx.GraphModule, nodes: Iterable[fx.Node], scope: str, replaces: tuple[str, ...]) -> None:
    """Give ``nodes``, in the order of their computation, the facts that capture would have given them.

    Args:
        model: what they are part of.
        nodes: those that a schedule has made.
        scope: the module that they belong to.
        replaces: the names of the nodes they stand for.
    """
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if not has_facts(node):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                value = values[node] = _value(model, node, values)
            set_value(node, value, scope=scope)
        set_facts(node, replaces=replaces)


def _value(model: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a node would give, if what goes in were zero; or ``_UNKNOWN``."""
    inputs = {n: _input(model, n, values) for n in node.all_input_nodes}
    if has_effect(node, model) or any(v is _UNKNOWN for v in inputs.values()):
        return _UNKNOWN
    args: Any = fx.node.map_arg(node.args, inputs.__getitem__)  # pyrefly: ignore
    kwargs: Any = fx.node.map_arg(node.kwargs, inputs.__getitem__)  # pyrefly: ignore
    instance = instance_of(node, model)
    try:
        if node.op == "get_attr":
            return instance
        if isinstance(instance, nn.Module):
            with eval_mode(instance):
                return instance(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return instance(*args, **kwargs)
    except Exception:  # whatever an operator dislikes about zeros: then nothing is known
        return _UNKNOWN


def _input(model: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node that others read: a tensor as capture saw it, or a size or a tuple, found anew."""
    if node not in values:
        info = facts(node).tensor
        if info is not None:
            parameter = next(model.parameters(), torch.empty(0))
            values[node] = torch.zeros(info.shape, dtype=info.dtype, device=parameter.device)
        else:
            values[node] = _value(model, node, values) if is_pure(node, model) else _UNKNOWN
    return values[node]
