"""Index arithmetic: floats that are made of integers and become integers again, such as positions counted by a sum.

A quantizer would move them off the whole numbers, and the cast that follows would cut them to the wrong ones.
"""

from torch import fx

from bitwright.graph import is_guard
from bitwright.graph.facts import facts
from bitwright.preparation.judge import is_float


def index_arithmetic(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute floats of no float tensor, and whose results only end in tensors of integers."""
    counted: set[fx.Node] = set()
    for node in graph.nodes:
        sources = [n for n in node.all_input_nodes if is_float(n)]
        if is_float(node) and node.op not in ("placeholder", "get_attr") and counted.issuperset(sources):
            counted.add(node)
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = [u for u in node.users if not is_guard(u)]
        if node in counted and readers and all(u in found or _holds_integers(u) for u in readers):
            found.add(node)
    return found


def _holds_integers(node: fx.Node) -> bool:
    info = facts(node).tensor
    return info is not None and not info.dtype.is_floating_point
