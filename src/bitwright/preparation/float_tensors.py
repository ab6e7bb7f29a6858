"""Which tensors hold floats that a quantizer may round, and which floats are indices, or ranked."""

import torch
from torch import fx

from bitwright.graph import is_guard
from bitwright.graph.facts import dtype_of, facts
from bitwright.nn.operators import Operator

_NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")
_RANKING = {"call_method": _NAMES, "call_function": tuple(getattr(torch, name) for name in _NAMES)}


def is_float(node: object) -> bool:
    """Whether a node returns a non-empty float tensor; a cache starts as an empty one."""
    info = facts(node).tensor if isinstance(node, fx.Node) else None
    return info is not None and info.dtype.is_floating_point and 0 not in info.shape


def operands(node: fx.Node, operator: Operator | None) -> list[fx.Node]:
    """The float tensors a node computes on, without the weight and bias among a function's arguments."""
    if operator is not None and operator.weight:
        first = node.args[0] if node.args else node.kwargs.get("input")
        return [first] if isinstance(first, fx.Node) else []
    return [n for n in node.all_input_nodes if is_float(n)]


def index_arithmetic(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose floats come from integers and become integers again, such as positions counted by a sum.

    A quantizer would move them off whole numbers, and the cast that follows would truncate them to the wrong ones.
    """
    counted: set[fx.Node] = set()
    for node in graph.nodes:
        computed = node.op not in ("placeholder", "get_attr") and is_float(node)
        if computed and all(n in counted for n in node.all_input_nodes if is_float(n)):
            counted.add(node)
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in counted and _ends_in_integers(node, found):
            found.add(node)
    return found


def _ends_in_integers(node: fx.Node, indices: set[fx.Node]) -> bool:
    """Whether only indices and tensors of integers are computed from a node, and at least one is."""
    readers = [user for user in node.users if not is_guard(user)]
    return bool(readers) and all(user in indices or _holds_integers(user) for user in readers)


def _holds_integers(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and not dtype.is_floating_point


def ranked(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values are ranked, such as the scores by which tokens are given to experts.

    A quantizer would make some of them equal, and which of equal values is the largest differs from runtime to runtime.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_float(node) and _leads_to_ranking(node, found):
            found.add(node)
    return found


def _leads_to_ranking(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a node is ranked, or only what is ranked is computed from it; a sum may be the trunk of a model."""
    ranking = [user for user in node.users if user in found or _ranks(user, node)]
    if not ranking:
        return False
    alone = sum(map(is_float, node.all_input_nodes)) == 1
    return alone or len(ranking) == sum(not is_guard(user) for user in node.users)


def _ranks(node: fx.Node, values: fx.Node) -> bool:
    known = _RANKING.get(node.op, ())
    return node.target in known and node.all_input_nodes[0] is values
