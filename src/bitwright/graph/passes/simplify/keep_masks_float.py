"""Keep sums with a mask in float:  softmax(scores + mask)  ->  softmax(add_mask(scores, mask)).

A mask holds values like -inf or -1e38. A quantized sum would need a range that holds them, in which all scores are one
and the same integer. So sums that reach a softmax, over nothing but reshapes and other sums, stay float.
"""

from torch import fx

from bitwright.graph.facts import facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.attention_parts import add_mask
from bitwright.nn.operators import operator_of


@register_schedule("keep_masks_float", stage="simplify", after=("split_attention", "decompose_attention"))
def keep_masks_float(model: CapturedModel) -> list[str]:
    """Mark every sum of two tensors before a softmax."""
    modules = dict(model.named_modules())
    notes, seen = [], set()
    for node in model.graph.nodes:
        kind = operator_of(node, modules)
        if kind is None or kind.name not in ("softmax", "log_softmax"):
            continue
        waiting = list(node.all_input_nodes)
        while waiting:
            before = waiting.pop()
            kind = operator_of(before, modules)
            if before in seen or kind is None or facts(before).written:
                continue
            seen.add(before)
            if kind.carries_scale(before, modules.get(str(before.target))):
                waiting += before.all_input_nodes[:1]
            elif kind.name in ("add", "add_mask"):
                waiting += before.all_input_nodes
                if kind.name == "add" and _of_two_tensors(before):
                    before.op, before.target = "call_function", add_mask
                    notes.append(f"{before.name} before {node.name} stays float")
    return notes


def _of_two_tensors(node: fx.Node) -> bool:
    return len(node.args) == 2 and not node.kwargs and all(shape_of(a) is not None for a in node.args)
