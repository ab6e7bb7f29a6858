"""The first and last layers of a network, which some settings keep in more bits."""

from collections.abc import Callable, Iterable

from torch import fx

from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts


def end_layers(model: CapturedModel, has_weight: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The layers with a weight that read the network's input or give its output, only single-input operators between.

    Args:
        model: the network.
        has_weight: says whether a node is a layer with a weight.
    """
    found: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.op == "placeholder":
            found |= _reached(node, has_weight, lambda n: n.users)
        elif node.op == "output":
            found |= _reached(node, has_weight, lambda n: n.all_input_nodes)
    return found


def _reached(
    start: fx.Node,
    has_weight: Callable[[fx.Node], bool],
    step: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting, seen = [start], {start}
    while waiting:
        node = waiting.pop()
        if has_weight(node):
            found.add(node)
        elif node is start or _tensors_in(node) <= 1:
            near = [n for n in step(node) if n not in seen]
            seen.update(near)
            waiting += near
    return found


def _tensors_in(node: fx.Node) -> int:
    return sum(1 for n in node.all_input_nodes if facts(n).tensor is not None and n.op != "get_attr")
