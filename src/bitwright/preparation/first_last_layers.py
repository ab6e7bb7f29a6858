"""The first and last layers of a network, which some settings keep in more bits."""

from collections.abc import Callable, Iterable

from torch import fx, nn

from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts
from bitwright.graph.walks import reached_from
from bitwright.nn.operators import operator_of


def first_last_layers(model: CapturedModel, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The layers with a weight that read the network's input or give its output, with single-input operators between.

    Args:
        model: the network.
        modules: its modules by name.
    """

    def has_weight(node: fx.Node) -> bool:
        operator = operator_of(node, modules)
        return operator is not None and operator.weight

    found: list[fx.Node] = []
    for node in model.graph.nodes:
        if node.op == "placeholder":
            found += reached_from(node, _until(has_weight, lambda n: n.users, node))
        elif node.op == "output":
            found += reached_from(node, _until(has_weight, lambda n: n.all_input_nodes, node))
    return {node for node in found if has_weight(node)}


def _until(
    has_weight: Callable[[fx.Node], bool], step: Callable[[fx.Node], Iterable[fx.Node]], start: fx.Node
) -> Callable[[fx.Node], Iterable[fx.Node]]:
    """Go on from ``start`` and over operators with one tensor, as far as the next layers with a weight."""

    def go_on(node: fx.Node) -> Iterable[fx.Node]:
        return step(node) if node is start or (not has_weight(node) and _tensors_in(node) <= 1) else ()

    return go_on


def _tensors_in(node: fx.Node) -> int:
    return sum(1 for n in node.all_input_nodes if facts(n).tensor is not None and n.op != "get_attr")
