"""Fold sums and products with constants into the layer before them:  conv(x)·c + d  ->  conv'(x).

    w' = w · c,   b' = b · c + d

The constants are numbers, or parameters and buffers with one value per output channel: layer scale, frozen norms that
are written out, learned gains. They keep their places and names, and still train. As with a BatchNorm, the layer
applies them as written while its weight is float, bit for bit, and multiplies them in once it is quantized. A
permutation or dropout may stand between the layer and the constant; the product moves past it.
"""

from typing import Any

from torch import fx

from bitwright.graph.facts import shape_of
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.passes.fold.arithmetic import OPERATORS, Arithmetic
from bitwright.graph.passes.fold.pattern import FoldPattern, is_layer
from bitwright.graph.rewriting.replace import Called, Nodes
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.sizes import permutation
from bitwright.graph.walks import between, operator_called
from bitwright.nn.channels import channel_axis
from bitwright.nn.layer import QuantLayer


@register_schedule("fold_scale", stage="fuse", after="fold_batchnorm")
class ReplacePattern(FoldPattern):
    """Fold every constant after a layer where possible, nearest first, and say why the others cannot."""

    def make_ops(self) -> list[MatcherNode]:
        return [
            MatcherNode("layer", None, QuantLayer, lambda _, module: is_layer(module), subclasses=True),
            MatcherNode(
                "step",
                ["layer"],
                OPERATORS,
                lambda node, _: Arithmetic.read(node) is not None,
                InputMatchType.SUBSET,
                through=_may_be_between,
            ),
        ]

    def make_joint_checkers(self) -> list[Any]:
        """The constant must have one value per channel of the layer, and nothing else may read the value before it."""
        return [(("layer", "step"), self._fits)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: object, *_: object) -> fx.Node:
        """Add the fold to the layer, and make readers of the result read the value before."""
        step: Any = Arithmetic.read(nodes_dict["step"])
        layer = modules_dict["layer"]
        layer.after = (*layer.after, step.fold(model, channel_axis(layer)))
        self.note(f"folded {step.node.name} into {nodes_dict['layer'].target}")
        return step.tensor

    def _fits(self, layer: fx.Node, step: fx.Node, modules: dict[str, Any]) -> bool | str:
        found: Any = Arithmetic.read(step)
        way = between(layer, found.tensor)
        drops = [n for n in way if permutation(n) is None]
        if drops and found.shifts:
            return False
        reason = self._why_apart(layer, modules["layer"], found)
        reason = reason or found.why_not(_axis_after(channel_axis(modules["layer"]), layer, way), lambda: self.written)
        return True if reason is None else f"{step.name} into {layer.target}, {reason}"

    def _why_apart(self, layer: fx.Node, module: Any, found: Arithmetic) -> str | None:
        if found.divides_by_tensor:
            return "it divides by the layer's result"
        if len(layer.users) > 1:
            return f"{layer.target} has {len(layer.users)} users"
        return f"{layer.target} is called more than once" if len(self.calls[module]) > 1 else None


def _may_be_between(node: fx.Node, instance: object) -> bool:
    """Whether a node is a permutation or a dropout that one other node reads."""
    kind = operator_called(node, instance)
    drops = kind is not None and kind.name == "dropout"
    return len(node.users) == 1 and (drops or permutation(node) is not None)


def _axis_after(axis: int, layer: fx.Node, way: list[fx.Node]) -> int:
    """Where an axis of a layer's result ends up after the permutations on the way, last first, counted from -1."""
    rank = len(shape_of(layer) or ())
    place = axis % rank if rank else 0
    for order in (permutation(node) for node in reversed(way)):
        place = place if order is None else order.index(place)
    return place - rank
