"""Read the parts of a tensor one by one, not as a tuple.

    unbind(x, d)[i]  ->  select(x, d, i),      split(x, n, d)[i]  ->  narrow(x, d, i·n, n)

Every part then is a tensor that a quantizer can follow. The parts of ``chunk`` and ``split`` are read this way if their
sizes are the same for all inputs.
"""

import itertools
import operator
from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import Sizes

_UNBIND = {"unbind", torch.unbind}
_CHUNK = {"chunk", torch.chunk}
_SPLIT = {"split", torch.split, "split_with_sizes", torch.split_with_sizes}


@register_schedule("unbind_to_select", stage="simplify", after="fold_shape_arithmetic")
class ReplacePattern(ReplacePatternBase):
    """Rewrite every tuple of parts that are read one by one, and say why the others stay."""

    done = "rewritten"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def begin(self, model: fx.GraphModule) -> None:
        """Remember the model, to work out its sizes if something is divided."""
        self.model = model
        self.sizes: Sizes | None = None

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("parts", None, _UNBIND | _CHUNK | _SPLIT, self._may_be_read)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> list[fx.Node | None]:
        node = nodes_dict["parts"]
        calls: Any = self._parts(node)
        made: list[fx.Node | None] = [None] * len(calls)
        for user in node.users:
            index: Any = user.args[1]
            if made[index] is None:
                function, *place = calls[index]
                made[index] = NodeBuilder(model, user).function(function, argument(node, 0, "input"), *place)
        self.note(f"{node.name} is read in {len(node.users)} parts")
        return made

    def _may_be_read(self, node: fx.Node, _: object) -> bool | str:
        if facts(node).written or not node.users:
            return False
        parts = self._parts(node)
        if isinstance(parts, str):
            return parts
        return all(_reads_one(user, len(parts)) for user in node.users) or "it is read as a whole"

    def _parts(self, node: fx.Node) -> list[tuple[Any, ...]] | str:
        """How each part is read, or why the parts are not known."""
        source, position = argument(node, 0, "input"), 1 if node.target in _UNBIND else 2
        shape, dimension = shape_of(source), argument(node, position, "dim", 0)
        if shape is None or "tensor" in node.kwargs:
            return "what it splits is not known"
        if not isinstance(dimension, int):
            return "its dimension is computed"
        if node.target in _UNBIND:
            return [(torch.select, dimension, i) for i in range(shape[dimension])]
        lengths = _lengths(node, self._size(source, dimension))
        if isinstance(lengths, str):
            return lengths
        starts = itertools.accumulate(lengths, initial=0)
        return [(torch.narrow, dimension, start, length) for start, length in zip(starts, lengths, strict=False)]

    def _size(self, tensor: fx.Node, dimension: int) -> int | None:
        """A size of a tensor, if it is the same for all inputs."""
        self.sizes = self.sizes or Sizes(self.model.graph, dict(self.model.named_modules()))
        known = self.sizes.of(tensor)
        return known[dimension] if known else None


def _reads_one(user: fx.Node, count: int) -> bool:
    index = user.args[1] if user.target is operator.getitem and facts(user).tensor is not None else None
    return isinstance(index, int) and -count <= index < count and not facts(user).written


def _lengths(node: fx.Node, size: int | None) -> list[int] | str:
    names = {"chunks", "split_size_or_sections", "split_size", "split_sizes"} & node.kwargs.keys()
    wish: Any = node.kwargs[names.pop()] if names else (*node.args, None)[1]
    if isinstance(wish, tuple | list) and all(isinstance(w, int) for w in wish):
        return list(wish)
    if not isinstance(wish, int):
        return "its sizes are computed"
    if size is None:
        return "the size it divides may change with the input"
    return _divided(size, -(-size // wish) if node.target in _CHUNK else wish)


def _divided(size: int, step: int) -> list[int] | str:
    return [min(step, size - start) for start in range(0, size, step)] if step else "nothing is divided"
