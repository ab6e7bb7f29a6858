"""Fold a BatchNorm into the convolution or linear layer before it:  bn(conv(x))  ->  conv'(x).

    w' = w · γ/√(var + eps),   b' = (b - mean) · γ/√(var + eps) + β

The BatchNorm keeps its place and name in the model, and its statistics go on moving in training; see ``QuantLayer``
for when which form is computed. What is folded:

- ``nn.BatchNorm1d`` to ``3d``, and calls of ``F.batch_norm``, as norms with a forward of their own make them;
- after a layer that is called several times, if each call goes into the same norm;
- through a channel shuffle:  bn(shuffle(conv(x)))  ->  shuffle(conv'(x)), with γ, β, mean and var in the layer's order.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import argument, module_of, replace
from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.passes.fold.shuffle import channel_order, only_moves
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import back_through
from bitwright.nn.fold import NORMS, Fold, FunctionFold, NormFold, ShuffledFold
from bitwright.nn.layer import QuantLayer

_FUNCTIONS = (F.batch_norm, torch.batch_norm)
_TENSORS = {"running_mean": 1, "running_var": 2, "weight": 3, "bias": 4}


@register_schedule("fold_batchnorm", stage="fuse", aliases=("fuse_bn",))
def fold_batchnorm(model: CapturedModel) -> list[str]:
    """Fold every BatchNorm that can be, and say why the others cannot."""
    calls: dict[object, list[fx.Node]] = defaultdict(list)
    for node in model.graph.nodes:
        if node.op == "call_module":
            calls[node.target].append(node)
    modules = dict(model.named_modules())
    notes = []
    settled: set[object] = set()
    for node in list(model.graph.nodes):
        if not isinstance(module_of(node, model), NORMS) and node.target not in _FUNCTIONS:
            continue
        name = str(node.target) if node.op == "call_module" else node.name
        if name in settled:
            continue
        settled.add(name)
        together = calls[node.target] if node.op == "call_module" else [node]
        found = _find_layer(model, node, modules)
        if isinstance(found, str):
            notes.append(f"not folded: {name}, {found}")
            continue
        before, order = found
        module = module_of(node, model)
        norm = NormFold(module) if isinstance(module, NORMS) else _function_fold(model, node)
        if reason := _why_not(model, together, norm, before, calls[before.target], order):
            notes.append(f"not folded: {name}, {reason}")
            continue
        _fold(model.get_submodule(str(before.target)), norm, order)  # pyrefly: ignore
        for call in together:
            replace(call, argument(call, 0, "input"))
        through = "" if order is None else " through the channel shuffle between them"
        notes.append(f"folded {name} into {before.target}{through}")
    return notes


def _find_layer(
    model: CapturedModel, node: fx.Node, modules: dict[str, nn.Module]
) -> tuple[fx.Node, list[int] | None] | str:
    """The layer before a norm, with the order in which its channels arrive, or why there is none."""
    start = argument(node, 0, "input")
    if not isinstance(start, fx.Node):
        return "what it normalises is not known"
    if _is_layer(model, start):
        return start, None
    *_, before = back_through(start, lambda n: only_moves(n, modules))
    order = channel_order(before, start, model) if _is_layer(model, before) else None
    if order is None:
        name = start.target if start.op == "call_module" else start.name
        return f"{name} before it is not a quantized layer with a weight"
    return before, order


def _is_layer(model: CapturedModel, node: fx.Node) -> bool:
    layer = module_of(node, model)
    return isinstance(layer, QuantLayer) and hasattr(layer, "weight")


def _function_fold(model: CapturedModel, node: fx.Node) -> FunctionFold | str:
    """A call of ``F.batch_norm`` as a fold, or why it is not one."""
    if argument(node, 5, "training", False) is not False:
        return "it normalises by the statistics of the batch"
    tensors: dict[str, Expression | None] = {}
    for name, place in _TENSORS.items():
        given = argument(node, place, name)
        if given is not None and not is_constant(given):
            return f"its {name} is computed from the input"
        tensors[name] = None if given is None else Expression(model, given)
    mean, var, weight, bias = tensors.values()
    if mean is None or var is None:
        return "it has no running statistics"
    momentum, eps = argument(node, 6, "momentum", 0.1), argument(node, 7, "eps", 1e-5)
    if isinstance(momentum, fx.Node) or isinstance(eps, fx.Node):
        return "its momentum or eps is computed"
    owner = mean.owner if isinstance(mean.owner, NORMS) else None
    return FunctionFold(mean, var, weight, bias, getattr(owner, "momentum", momentum), eps, owner)


def _why_not(
    model: CapturedModel,
    together: list[fx.Node],
    norm: Fold | str,
    before: fx.Node,
    layer_calls: list[fx.Node],
    order: list[int] | None,
) -> str | None:
    layer = model.get_submodule(str(before.target))
    if isinstance(norm, str):
        return norm
    if isinstance(norm, NormFold) and norm.module.running_mean is None:
        return "it has no running statistics"
    if any(facts(call).written for call in together):
        return "it shares memory with a tensor that is written to in place"
    if layer.after:  # pyrefly: ignore
        return f"{before.target} before it has a norm folded in already"
    if order is None and len(before.users) > 1:
        return f"{before.target} before it has {len(before.users)} users"
    if (len(together), len(layer_calls)) != (1, 1) and (order is not None or not _go_together(together, layer_calls)):
        return "it or the layer before it is called more than once"
    info = facts(before).tensor
    if isinstance(layer, nn.Linear) and (info is None or len(info.shape) != 2):
        return "it normalises another axis than the one the linear layer produces"
    return None


def _go_together(norms: list[fx.Node], layers: list[fx.Node]) -> bool:
    """Whether each call of a layer goes into a call of the norm and nowhere else, and the other way round."""
    return {argument(n, 0, "input") for n in norms} == set(layers) and all(len(layer.users) == 1 for layer in layers)


def _fold(layer: QuantLayer, norm: Fold, order: list[int] | None) -> None:
    layer.after = (norm if order is None else ShuffledFold(norm, torch.tensor(order)),)
