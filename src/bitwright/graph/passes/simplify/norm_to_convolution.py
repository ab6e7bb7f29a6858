"""Give a BatchNorm that stands alone a convolution to be folded into:  bn(x)  ->  bn(depthwise(x)).

The convolution multiplies each channel by 1. Once the norm is folded into it, its weights are the norm's factors, each
with a scale of its own, so that they are stored without error. What is before the norm must be an operator whose result
is quantized in any case, and is not itself a layer that takes the norm in, nor is what follows.
"""

from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import MatcherNode
from bitwright.graph.names import module_of, node_name
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import back_through, moves_values, operator_called, value_readers

_ROUNDED = ("relu", "relu6", "clamp", "leaky_relu", "sigmoid", "add", "mul", "cat")


@register_schedule("norm_to_convolution", stage="simplify", after="remove_identity", default=False)
class ReplacePattern(ReplacePatternBase):
    """Put a convolution before each such BatchNorm2d."""

    done = "given a convolution"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("norm", None, nn.BatchNorm2d, _stands_alone)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> None:
        norm, module = nodes_dict["norm"], modules_dict["norm"]
        x: Any = argument(norm, 0, "input")
        made = NodeBuilder(model, norm).module(_ones(module), x, name=f"{norm.name}_factors", like=x)
        norm.replace_input_with(x, made)
        self.note(f"{node_name(norm)} is folded into a convolution of its own")


def _ones(norm: Any) -> Any:
    """A convolution that changes nothing, on the device of a norm."""
    made: Any = nn.Conv2d(norm.num_features, norm.num_features, 1, groups=norm.num_features, bias=False)
    like = norm.running_mean
    del made.weight
    made.register_buffer("weight", torch.ones(norm.num_features, 1, 1, 1).to(like), persistent=False)
    made.multiplies_by_one = True  # what its QuantLayer reads to skip it while the weight is float
    return made


def _stands_alone(norm: fx.Node, module: Any) -> bool:
    x = argument(norm, 0, "input")
    if module.running_mean is None or len(shape_of(x) or ()) != 4 or facts(norm).written or facts(x).written:
        return False
    calls = norm.graph.find_nodes(op="call_module", target=norm.target)
    return len(calls) == 1 and _is_rounded(x) and not _feeds_a_layer(norm)


def _is_rounded(x: fx.Node) -> bool:
    """Whether an operator with a quantized result makes a tensor, and not a layer that only the norm reads."""
    model: Any = x.graph.owning_module
    *_, maker = back_through(x, lambda node: moves_values(node, module_of(node, model)))
    kind = operator_called(maker, module_of(maker, model))
    if kind is None:
        return False
    if kind.weight:
        return kind.name in ("conv1d", "conv2d", "conv3d") and len(value_readers(maker)) > 1
    return kind.name in _ROUNDED or (kind.pool and "max" not in kind.name)


def _feeds_a_layer(norm: fx.Node) -> bool:
    """Whether a layer is the only reader, which the norm may be folded into."""
    model: Any = norm.graph.owning_module
    kinds = [operator_called(user, module_of(user, model)) for user in norm.users]
    return len(kinds) == 1 and kinds[0] is not None and kinds[0].weight
