"""Keep sums with a mask in float:  softmax(scores + mask)  ->  softmax(add_mask(scores, mask)).

A mask holds values like -inf or -1e38. A quantized sum would need a range that includes them, in which all scores are
the same integer. So sums that reach a softmax through nothing but moved values and other sums stay float.
"""

from torch import fx

from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import moves_values
from bitwright.nn.attention_parts import add_mask


@register_schedule("keep_masks_float", stage="simplify", after=("split_attention", "decompose_attention"))
class ReplacePattern(ReplacePatternBase):
    """Mark every sum of two tensors before a softmax, then the sums that go into it, and so on."""

    def make_ops(self) -> list[MatcherNode]:
        readers = ["op:softmax", "op:log_softmax", "op:add_mask"]
        return [
            MatcherNode("sum", None, "op:add", _adds_two_tensors),
            MatcherNode(
                "reader", ["sum"], readers, input_match_type=InputMatchType.SUBSET, through=_moves_unwritten_values
            ),
        ]

    def get_new_graph(self, nodes_dict: Nodes, *_: object) -> None:
        node = nodes_dict["sum"]
        node.op, node.target = "call_function", add_mask
        self.note(f"{node.name} before {nodes_dict['reader'].name} stays float")


def _adds_two_tensors(node: fx.Node, _: object) -> bool:
    two = len(node.args) == 2 and not node.kwargs and all(shape_of(a) is not None for a in node.args)
    return two and not facts(node).written


def _moves_unwritten_values(node: fx.Node, instance: object) -> bool:
    return moves_values(node, instance) and not facts(node).written
