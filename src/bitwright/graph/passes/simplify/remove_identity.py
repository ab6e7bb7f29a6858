"""Remove what returns its input:  identity(x)  ->  x,  x[:, :all]  ->  x,  cat([tensor([]), x])  ->  x.

This removes ``nn.Identity`` and empty ``nn.Sequential`` modules, except those with hooks, which somebody watches. It
removes a slice if it takes all of each dimension, whatever the input. (OpenVINO crashes on some before a sum.) It
removes a concatenation if all operands but one are empty, as a decoder's cache is at first. (Its quantizer would
follow the operand's, and onnxruntime merges the two, with other values.)
"""

import operator
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.facts import dtype_of, facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import Sizes
from bitwright.graph.walks import first_input
from bitwright.torch_internals import has_hooks

_CATS = (torch.cat, torch.concat, torch.concatenate)
_TYPES = [nn.Identity, nn.Sequential, operator.getitem, *_CATS]
_MAKERS = (torch.tensor, torch.empty, torch.zeros, torch.ones)


@register_schedule("remove_identity", stage="simplify")
class ReplacePattern(ReplacePatternBase):
    """Remove every identity; the modules stay in the tree, under their names."""

    done = "removed"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def begin(self, model: fx.GraphModule) -> None:
        """Remember the model, to work out its sizes if something is sliced."""
        self.model = model
        self.sizes: Sizes | None = None

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("identity", None, _TYPES, self._may_go)]

    def get_new_graph(self, nodes_dict: Nodes, *_: object) -> fx.Node | None:
        node = nodes_dict["identity"]
        return _only_operand(node) if node.target in _CATS else first_input(node)

    def _may_go(self, node: fx.Node, module: Any) -> bool | str:
        if node.target is operator.getitem:
            return self._takes_all(node)
        if node.target in _CATS:
            return not facts(node).written and _only_operand(node) is not None
        if isinstance(module, nn.Sequential) and len(module):
            return False
        return not has_hooks(module) or "it has hooks"

    def _takes_all(self, node: fx.Node) -> bool:
        source, index = node.args
        slices: Any = index if isinstance(index, tuple) else (index,)
        if not isinstance(source, fx.Node) or not all(map(_from_the_start, slices)):
            return False
        if facts(node).written or len(shape_of(source) or ()) < len(slices):
            return False
        if all(s.stop is None for s in slices):
            return True
        self.sizes = self.sizes or Sizes(self.model.graph, dict(self.model.named_modules()))
        known = self.sizes.of(source)
        return bool(known) and all(_covers(s.stop, size) for s, size in zip(slices, known, strict=False))


def _from_the_start(index: object) -> bool:
    return isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1)


def _covers(stop: object, size: int | None) -> bool:
    return stop is None or (isinstance(stop, int) and size is not None and stop >= size)


def _only_operand(node: fx.Node) -> fx.Node | None:
    """The one operand of a concatenation that is not always empty; None if there are several."""
    operands: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(operands, list | tuple):
        return None
    full = [o for o in operands if not _is_empty(o)]
    same = len(full) == 1 < len(operands) and isinstance(full[0], fx.Node) and dtype_of(full[0]) == dtype_of(node)
    return full[0] if same else None


def _is_empty(operand: object) -> bool:
    """Whether an operand always has the shape (0,), which concatenations of any rank pass over."""
    if not isinstance(operand, fx.Node) or shape_of(operand) != (0,):
        return False
    made = operand.target in _MAKERS and not any(isinstance(a, fx.Node) for a in operand.args)
    return made or operand.op == "get_attr"
