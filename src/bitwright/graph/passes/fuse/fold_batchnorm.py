"""Fold a BatchNorm into the convolution or linear layer before it:  bn(conv(x))  ->  conv'(x).

    w' = w · γ/√(var + eps),   b' = (b - mean) · γ/√(var + eps) + β

The BatchNorm keeps its place and name in the model, and its statistics keep moving in training; ``QuantLayer`` explains
when each form is computed. These are folded:

- ``nn.BatchNorm1d`` to ``3d``, and calls of ``F.batch_norm`` from norms with their own forward;
- after a layer that is called several times, if each call goes into the same norm;
- through a channel shuffle:  bn(shuffle(conv(x)))  ->  shuffle(conv'(x)), with γ, β, mean and var in the layer's order.
"""

from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.build import argument, replace
from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.names import node_name
from bitwright.graph.passes.fold.pattern import FoldPattern, is_layer
from bitwright.graph.passes.fold.shuffle import channel_order, rearranges
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import first_input
from bitwright.nn.fold import NORMS, Fold, FunctionFold, NormFold, ShuffledFold

_TENSORS = {"running_mean": 1, "running_var": 2, "weight": 3, "bias": 4}


@register_schedule("fold_batchnorm", stage="fuse", aliases=("fuse_bn",))
class ReplacePattern(FoldPattern):
    """Fold every BatchNorm where possible, and say why the others cannot."""

    strategy = ReplaceStrategy.APPLY_INTERSECT
    near_miss = ReplacePatternBase.near_miss  # reasons do not name the norm

    def make_ops(self) -> list[MatcherNode]:
        return [
            MatcherNode("layer", None, None, _is_layer),
            MatcherNode(
                "norm",
                ["layer"],
                ["op:batch_norm", nn.SyncBatchNorm],
                input_match_type=InputMatchType.FIRST,
                through=rearranges,
            ),
        ]

    def make_joint_checkers(self) -> list[Any]:
        """The norm must be a map of the layer's channels, and nothing else may read its input."""
        return [(("layer", "norm"), self._fits)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, *_: object) -> fx.Node | None:
        """Add the fold to the layer, and make readers of the norm, in any of its calls, read its input."""
        layer, norm = nodes_dict["layer"], nodes_dict["norm"]
        fold: Any = self._fold(norm, modules_dict["norm"])
        order = self._order(layer, norm)
        modules_dict["layer"].after = (fold if order is None else ShuffledFold(fold, torch.tensor(order)),)
        for call in self._calls_of(norm):
            if call is not norm:
                replace(call, first_input(call))
        through = "" if order is None else " through the channel shuffle between them"
        self.note(f"folded {node_name(norm)} into {layer.target}{through}")
        return first_input(norm)

    def _calls_of(self, norm: fx.Node) -> list[fx.Node]:
        return self.calls[self.model.get_submodule(str(norm.target))] if norm.op == "call_module" else [norm]

    def _order(self, layer: fx.Node, norm: fx.Node) -> list[int] | None:
        """The order in which a layer's channels arrive at a norm, if they are shuffled."""
        start = first_input(norm)
        return None if start is None or start is layer else channel_order(layer, start, self.model)

    def _fold(self, node: fx.Node, module: object) -> Fold | str:
        """A norm as a fold, or why it is not one."""
        if not isinstance(module, NORMS):
            return _function_fold(self.model, node)
        return "it has no running statistics" if module.running_mean is None else NormFold(module)

    def _fits(self, layer: fx.Node, norm: fx.Node, modules: dict[str, Any]) -> bool | str:
        direct = first_input(norm) is layer
        if not direct and (not is_layer(modules["layer"]) or self._order(layer, norm) is None):
            return False
        if not is_layer(modules["layer"]):
            return True  # the checker said why not
        fold = self._fold(norm, modules["norm"])
        reason = fold if isinstance(fold, str) else self._why_apart(layer, norm, modules["layer"], direct)
        return reason or True

    def _why_apart(self, layer: fx.Node, norm: fx.Node, module: Any, direct: bool) -> str | None:
        norms, layers = self._calls_of(norm), self.calls[module]
        if any(facts(call).written for call in norms):
            return "it shares memory with a tensor that is written to in place"
        if module.after:
            return f"{layer.target} before it has a norm folded in already"
        if direct and len(layer.users) > 1:
            return f"{layer.target} before it has {len(layer.users)} users"
        if max(len(norms), len(layers)) > 1 and not (direct and _go_together(norms, layers)):
            return "it or the layer before it is called more than once"
        return _why_other_axis(layer, module)


def _is_layer(node: fx.Node, module: object) -> bool | str:
    return is_layer(module) or f"{node_name(node)} before it is not a quantized layer with a weight"


def _why_other_axis(layer: fx.Node, module: object) -> str | None:
    if not isinstance(module, nn.Linear) or len(shape_of(layer) or ()) == 2:
        return None
    return "it normalises an axis other than the one the linear layer produces"


def _function_fold(model: nn.Module, node: fx.Node) -> FunctionFold | str:
    """A call of ``F.batch_norm`` as a fold, or why it is not one."""
    if argument(node, 5, "training", False) is not False:
        return "it normalises by batch statistics"
    present = {name: given for name, at in _TENSORS.items() if (given := argument(node, at, name)) is not None}
    if moving := [name for name, tensor in present.items() if not is_constant(tensor)]:
        return f"its {moving[0]} is computed from the input"
    if not {"running_mean", "running_var"} <= present.keys():
        return "it has no running statistics"
    momentum, eps = argument(node, 6, "momentum", 0.1), argument(node, 7, "eps", 1e-5)
    if fx.Node in (type(momentum), type(eps)):
        return "its momentum or eps is computed"
    values = {name: Expression(model, tensor) for name, tensor in present.items()}
    mean, var = values["running_mean"], values["running_var"]
    return FunctionFold(mean, var, values.get("weight"), values.get("bias"), momentum, eps)


def _go_together(norms: list[fx.Node], layers: list[fx.Node]) -> bool:
    """Whether every call of the layer feeds only a call of the norm, and every call of the norm reads the layer."""
    return {first_input(n) for n in norms} == set(layers) and all(len(layer.users) == 1 for layer in layers)
