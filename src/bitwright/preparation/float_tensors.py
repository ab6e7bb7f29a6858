"""Which tensors hold floats that a quantizer may round, and which floats are actually indices."""

from torch import fx

from bitwright.graph import is_guard
from bitwright.graph.facts import dtype_of, shape_of
from bitwright.nn.operators import Operator


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
