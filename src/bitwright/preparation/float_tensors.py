"""Which tensors hold floats that a quantizer may round, and which floats are indices, or ranked."""

import torch
from torch import fx

from bitwright.graph import is_guard
from bitwright.graph.facts import dtype_of, shape_of
from bitwright.nn.operators import Operator

_RANKING = (torch.topk, torch.sort, torch.argsort, torch.argmax, torch.argmin, torch.kthvalue)
_RANKING_METHODS = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")


def is_float(node: object) -> bool:
    """Whether a node returns a non-empty float tensor; a cache starts as an empty one."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point and 0 not in (shape_of(node) or ())


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
        sources = [n for n in node.all_input_nodes if is_float(n)]
        if is_float(node) and node.op not in ("placeholder", "get_attr") and counted.issuperset(sources):
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
    readers = [user for user in node.users if not is_guard(user)]
    ranking = [user for user in readers if user in found or _ranks(user, node)]
    alone = sum(map(is_float, node.all_input_nodes)) == 1
    return bool(ranking) and (alone or len(ranking) == len(readers))


def _ranks(node: fx.Node, values: fx.Node) -> bool:
    ranks = node.target in (_RANKING_METHODS if node.op == "call_method" else _RANKING)
    return ranks and node.op in ("call_method", "call_function") and node.all_input_nodes[0] is values
