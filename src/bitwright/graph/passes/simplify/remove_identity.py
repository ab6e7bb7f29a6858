"""Remove what returns its input:  identity(x)  ->  x.

``nn.Identity`` and empty ``nn.Sequential`` modules go. Those with hooks stay, because somebody looks at them.
"""

from typing import Any

from torch import fx, nn

from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import first_input
from bitwright.torch_internals import has_hooks


@register_schedule("remove_identity", stage="simplify")
class ReplacePattern(ReplacePatternBase):
    """Remove every identity; the modules stay in the tree, under their names."""

    done = "removed"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("identity", None, [nn.Identity, nn.Sequential], _may_go)]

    def get_new_graph(self, nodes_dict: Nodes, *_: Any) -> fx.Node | None:
        """Put its input in its place."""
        return first_input(nodes_dict["identity"])


def _may_go(_: fx.Node, module: Any) -> bool | str:
    if isinstance(module, nn.Sequential) and len(module):
        return False
    return not has_hooks(module) or "it has hooks"
