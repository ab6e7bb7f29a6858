"""No quantizer between an operator and its activation:  q(relu(q(conv(x))))  ->  q(relu(conv(x))).

A backend that computes both at once never rounds in between. This marks the activations whose input nothing else
reads; those that the backend can fuse (``operators.fused``) then join the integer operator before them. If switched
off, every activation is separate, and its input is quantized as well.
"""

from torch import fx

from bitwright.graph.facts import set_facts
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.operators import OPERATORS


@register_schedule("disable_unnecessary_quant", stage="fuse", after="*")
class ReplacePattern(ReplacePatternBase):
    """Mark every activation that may join the operator before it, and say where others read that result too."""

    strategy = ReplaceStrategy.APPLY_INTERSECT

    def make_ops(self) -> list[MatcherNode]:
        activations = [operator for operator in OPERATORS.values() if operator.activation]
        return [
            MatcherNode("before", None, None, _has_one_user),
            MatcherNode("activation", ["before"], activations, input_match_type=InputMatchType.FIRST),
        ]

    def near_miss(self, node: fx.Node, reason: str) -> None:
        self.note(f"not joined: {node.name} and {reason}")

    def get_new_graph(self, nodes_dict: Nodes, *_: object) -> None:
        """Leave the graph as it is, and note a fact."""
        set_facts(nodes_dict["activation"], joins=True)


def _has_one_user(node: fx.Node, _: object) -> bool | str:
    return len(node.users) == 1 or f"{node.name}, which has {len(node.users)} users"
