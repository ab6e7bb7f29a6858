"""Replace sizes that no input can change by numbers:  x.shape[1] * 2  ->  64  after a layer with 32 channels.

A size counts as fixed where a layer, a parameter or a reshape with a plain number sets it. Sizes of the inputs (batch,
image, sequence) stay symbolic, so the model still accepts others.
"""

from torch import fx

from bitwright.graph.build import replace
from bitwright.graph.facts import facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import Sizes


@register_schedule("fold_shape_arithmetic", stage="simplify", after=("split_attention", "decompose_attention"))
def fold_shape_arithmetic(model: CapturedModel) -> list[str]:
    """Fold every known size, along with what was only computed for it."""
    plain = [node for node in model.graph.nodes if facts(node).plain]
    if not plain:
        return []
    sizes = Sizes(model.graph, dict(model.named_modules()))
    notes = []
    for node in plain:
        number = sizes.number(node)
        if number is None or not node.users:
            continue
        if any(user.op == "output" for user in node.users):
            notes.append(f"not folded: {node.name}, it is a result of the model")
            continue
        if _is_part_of_known(node, sizes):
            continue  # folded with what reads it
        before = list(node.all_input_nodes)
        replace(node, number)
        _erase_unread(before)
        notes.append(f"{node.name} is {number}")
    return notes


def _is_part_of_known(node: fx.Node, sizes: Sizes) -> bool:
    return all(sizes.number(user) is not None for user in node.users)


def _erase_unread(nodes: list[fx.Node]) -> None:
    for node in nodes:
        if not node.users and facts(node).plain and node.op in ("call_function", "call_method"):
            before = list(node.all_input_nodes)
            node.graph.erase_node(node)
            _erase_unread(before)
