"""Remove what returns its input:  identity(x)  ->  x,  x[:, :all]  ->  x.

``nn.Identity`` and empty ``nn.Sequential`` modules go. Those with hooks stay, because somebody looks at them. A slice
goes if it takes all of each dimension, whatever the input. (OpenVINO crashes on some that it finds before a sum.)
"""

import operator
from typing import Any

from torch import fx, nn

from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import Sizes
from bitwright.graph.walks import first_input
from bitwright.torch_internals import has_hooks


@register_schedule("remove_identity", stage="simplify")
class ReplacePattern(ReplacePatternBase):
    """Remove every identity; the modules stay in the tree, under their names."""

    done = "removed"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def begin(self, model: fx.GraphModule) -> None:
        """Remember the model, whose sizes are worked out if something is sliced."""
        self.model = model
        self.sizes: Sizes | None = None

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("identity", None, [nn.Identity, nn.Sequential, operator.getitem], self._may_go)]

    def get_new_graph(self, nodes_dict: Nodes, *_: Any) -> fx.Node | None:
        """Put its input in its place."""
        return first_input(nodes_dict["identity"])

    def _may_go(self, node: fx.Node, module: Any) -> bool | str:
        if node.target is operator.getitem:
            return self._takes_all(node)
        if isinstance(module, nn.Sequential) and len(module):
            return False
        return not has_hooks(module) or "it has hooks"

    def _takes_all(self, node: fx.Node) -> bool:
        source, index = node.args
        slices: Any = index if isinstance(index, tuple) else (index,)
        if not isinstance(source, fx.Node) or facts(node).written or len(shape_of(source) or ()) < len(slices):
            return False
        if not all(isinstance(s, slice) and s.start in (None, 0) and s.step in (None, 1) for s in slices):
            return False
        if all(s.stop is None for s in slices):
            return True
        self.sizes = self.sizes or Sizes(self.model.graph, dict(self.model.named_modules()))
        known = self.sizes.of(source)
        return bool(known) and all(_covers(s.stop, size) for s, size in zip(slices, known, strict=False))


def _covers(stop: object, size: int | None) -> bool:
    return stop is None or (isinstance(stop, int) and size is not None and stop >= size)
