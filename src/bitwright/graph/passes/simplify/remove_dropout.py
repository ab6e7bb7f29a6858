"""Remove dropout that drops nothing:  dropout(x, p=0)  ->  x,  dropout(x, p, training=False)  ->  x.

A dropout module with p > 0 stays: training the prepared model needs it, and quantizers see through it. The option
``trained`` removes these too, for models that will not be trained any more:  ``remove_dropout: {trained: true}``.
"""

from torch import fx, nn

from bitwright.graph.build import argument
from bitwright.graph.facts import facts
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import first_input
from bitwright.torch_internals import has_hooks


@register_schedule("remove_dropout", stage="simplify")
class ReplacePattern(ReplacePatternBase):
    """Remove dropout that does nothing, and say where it stays for training.

    Args:
        trained: the model will not be trained again, so dropout modules can go too.
    """

    done = "removed"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def __init__(self, trained: bool = False) -> None:
        self.trained = trained

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("dropout", None, "op:dropout", self._may_go)]

    def get_new_graph(self, nodes_dict: Nodes, *_: object) -> fx.Node | None:
        return first_input(nodes_dict["dropout"])

    def _may_go(self, node: fx.Node, module: object) -> bool | str:
        if facts(node).written:
            return "it writes into a tensor that others read"
        if not isinstance(module, nn.Module):
            idle = argument(node, 2, "training", True) is False or argument(node, 1, "p", 0.5) == 0
            return idle or "it is active in evaluation too"
        if has_hooks(module):
            return "it has hooks"
        return self.trained or getattr(module, "p", 0) == 0 or "training needs it"
