"""Split activations into operators for which runtimes have integer kernels.

    silu(x)         ->  x · sigmoid(x)
    hardsigmoid(x)  ->  relu6(x + 3) / 6
    hardswish(x)    ->  x · relu6(x + 3) / 6

Torch computes both sides alike, to the last bit. What follows a linear layer or a norm stays whole: such results are
float, and to quantize them for the parts costs more than the parts gain.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from bitwright.graph.build import NodeBuilder, argument
from bitwright.graph.facts import dtype_of, facts
from bitwright.graph.match import MatcherNode
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import container, module_of, namespace
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import back_through, moves_values, operator_called
from bitwright.nn.activation_parts import gated
from bitwright.torch_internals import has_hooks

_THREE = "three"  # in a model's namespace, among the constants
_FLOAT_RESULTS = ("linear", "layer_norm", "group_norm", "instance_norm", "rms_norm", "matmul")


@register_schedule("split_activations", stage="simplify", default=False)
class ReplacePattern(ReplacePatternBase):
    """Split every SiLU, hard-sigmoid and hard-swish on float32 tensors, and say why others stay."""

    done = "split"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("activation", None, [f"op:{name}" for name in _PARTS], _may_be_split)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> fx.Node:
        node, module = nodes_dict["activation"], modules_dict["activation"]
        build = NodeBuilder(model, node, scope=str(node.target) if node.op == "call_module" else None, splits=True)
        kind: Any = operator_called(node, module)
        return _PARTS[kind.name](build, argument(node, 0, "input"))


def _may_be_split(node: fx.Node, module: Any) -> bool | str:
    x = argument(node, 0, "input")
    if facts(node).skipped:
        return f"skipped by the rule {facts(node).skipped!r}"
    if not isinstance(x, fx.Node) or dtype_of(x) is not torch.float32 or facts(node).written or facts(x).written:
        return "it computes on something else than a float32 tensor of its own"
    if node.op == "call_module" and has_hooks(module):
        return "it has hooks"
    return not _is_float_result(x) or "its input is the result of a linear layer or a norm"


def _is_float_result(x: fx.Node) -> bool:
    """Whether what a tensor is made by, before it is moved, has a float result on most targets."""
    model: Any = x.graph.owning_module
    *_, maker = back_through(x, lambda node: moves_values(node, module_of(node, model)))
    kind = operator_called(maker, module_of(maker, model))
    return kind is not None and kind.name in _FLOAT_RESULTS


def _silu(build: NodeBuilder, x: fx.Node) -> fx.Node:
    return build.function(gated, x, build.function(torch.sigmoid, x, like=x), like=x)


def _hardsigmoid(build: NodeBuilder, x: fx.Node) -> fx.Node:
    return build.function(operator.truediv, _shifted(build, x), 6.0, like=x)


def _hardswish(build: NodeBuilder, x: fx.Node) -> fx.Node:
    product = build.function(operator.mul, x, _shifted(build, x), like=x)
    return build.function(operator.truediv, product, 6.0, like=x)


def _shifted(build: NodeBuilder, x: fx.Node) -> fx.Node:
    """relu6(x + 3), with a tensor for the number: integer kernels add two tensors."""
    total = build.function(operator.add, x, build.attribute(_three(build.model)), like=x)
    return build.function(F.relu6, total, like=x)


def _three(model: CapturedModel) -> str:
    path = [namespace(model), "constants"]
    home = container(model, path)
    if _THREE not in home._buffers:
        home.register_buffer(_THREE, torch.tensor(3.0), persistent=False)
    return ".".join([*path, _THREE])


_PARTS: dict[str, Callable[[NodeBuilder, fx.Node], fx.Node]] = {
    "silu": _silu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
}
