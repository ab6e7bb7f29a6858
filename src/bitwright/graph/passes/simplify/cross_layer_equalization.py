"""Equalize the ranges of channels across layers:  f₂(act(f₁(x)))  with  f₁/s  and  f₂·s.

For an activation with act(s·x) = s·act(x) for s > 0 (ReLU, LeakyReLU, PReLU, or none), channel i may be divided by sᵢ
after the first layer and multiplied by it in the second:

    sᵢ = √(r₁ᵢ · r₂ᵢ) / r₂ᵢ,      r₁ᵢ = max |w₁[i]|,  r₂ᵢ = max |w₂[:, i]|

after which channel i has the range √(r₁ᵢ · r₂ᵢ) in both. Chains of layers are gone through several times. Where a
BatchNorm follows the first layer, its weight and bias take the factor (r₁ is that of the folded weight).

Off unless asked for: it changes parameters, so the model equals the original up to rounding only, and a ``state_dict``
loaded afterwards brings the original ranges back. Weights with one scale per tensor gain most, as depthwise
convolutions do. ``cross_layer_equalization: {iterations: 20, relu6: true}``; with ``relu6``, ReLU6 counts as ReLU:
its limit of 6 then cuts at another place, which changes what the model computes.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.errors import ConfigError
from bitwright.graph.build import argument, has_hooks, module_of
from bitwright.graph.facts import shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.operators import Operator, operator_of

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


@dataclass
class Pair:
    """Two layers, and the norm between them if there is one, whose channels share a factor."""

    first: Any
    norm: Any
    second: Any
    names: tuple[str, str]


@register_schedule(
    "cross_layer_equalization",
    stage="simplify",
    after=("remove_identity", "remove_dropout", "fold_constants", "merge_reshapes"),
    default=False,
    tolerance=1e-4,
)
def cross_layer_equalization(model: CapturedModel, iterations: int = 10, relu6: bool = False) -> list[str]:
    """Equalize every pair of layers that can be, and say why the others cannot.

    Args:
        model: the model; its parameters are changed.
        iterations: how often the pairs are gone through; it ends earlier once nothing moves any more.
        relu6: take ReLU6 for ReLU.
    """
    if iterations < 1:
        raise ConfigError(f"cross_layer_equalization: iterations must be 1 or more, not {iterations}")
    pairs, notes = _find_pairs(model, relu6)
    with torch.no_grad():
        ratios = [torch.ones(()) for _ in pairs]
        for _ in range(iterations):
            moved = [_equalize(pair) for pair in pairs]
            ratios = [r * s for r, s in zip(ratios, moved, strict=True)]
            if all(torch.allclose(s, torch.ones_like(s), atol=1e-3) for s in moved):
                break
    for pair, ratio in zip(pairs, ratios, strict=True):
        low, high = float(ratio.min()), float(ratio.max())
        notes.append(f"equalized {pair.names[0]} with {pair.names[1]}, by factors from {low:.2g} to {high:.2g}")
    return notes


def _find_pairs(model: CapturedModel, relu6: bool) -> tuple[list[Pair], list[str]]:
    modules = dict(model.named_modules())
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    owners = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
    reads = {str(n.target) for n in model.graph.nodes if n.op == "get_attr"}
    pairs, notes = [], []
    for node in model.graph.nodes:
        second = module_of(node, model)
        if type(second) not in _LAYERS:
            continue
        before, between, norm = argument(node, 0, "input"), [], None
        while isinstance(before, fx.Node) and (kind := operator_of(before, modules)) is not None:
            between.append(before)
            if kind.name == "batch_norm" and before.op == "call_module" and norm is None:
                norm = before
            elif norm is not None or not _passes(kind, second, relu6):
                break
            before = argument(before, 0, "input")
        first = module_of(before, model)
        if type(first) not in _LAYERS or not isinstance(before, fx.Node):
            continue
        names = (str(before.target), str(node.target))
        together = [names[0], names[1], *([str(norm.target)] if norm is not None else [])]
        reason = next((f"{n.name} has {len(n.users)} users" for n in between if len(n.users) > 1), None)
        if norm is not None and isinstance(first, nn.Linear) and len(shape_of(norm) or ()) != 2:
            reason = "the norm between them is on another axis"
        reason = reason or _why_not(first, module_of(norm, model), second, together, calls, reads)
        reason = reason or _shares(model, together, owners)
        if reason:
            notes.append(f"not equalized: {names[0]} with {names[1]}, {reason}")
        else:
            pairs.append(Pair(first, module_of(norm, model), second, names))
    return pairs, notes


def _passes(kind: Operator, second: Any, relu6: bool) -> bool:
    """Whether a factor per channel can move past an operator to the layer that reads it."""
    if kind.pool:
        return not isinstance(second, nn.Linear)  # a pool mixes what a linear layer takes for channels
    return kind.homogeneous or (relu6 and kind.name == "relu6")


def _why_not(first: Any, norm: Any, second: Any, names: list[str], calls: Counter[str], reads: set[str]) -> str | None:
    if repeated := next((n for n in names if calls[n] > 1), None):
        return f"{repeated} is called more than once"
    if read := next((r for r in reads if r.rpartition(".")[0] in names), None):
        return f"{read} is read by something else"
    if has_hooks(first) or has_hooks(second):
        return "one of them has hooks"
    if isinstance(first, nn.Linear) != isinstance(second, nn.Linear):
        return "their channels are on different axes"
    if norm is not None and norm.weight is None:
        return "the norm between them has no weight to take the factor"
    if _outputs(first) != _inputs(second):
        return f"{_outputs(first)} channels come out and {_inputs(second)} go in"
    return None


def _shares(model: CapturedModel, names: list[str], owners: Counter[int]) -> str | None:
    for name in names:
        if any(owners[id(p)] > 1 for p in model.get_submodule(name).parameters()):
            return f"{name} shares parameters with another layer"
    return None


def _equalize(pair: Pair) -> Tensor:
    """Move one factor per channel from the first layer to the second; return the factors."""
    first, second = _first_range(pair), _second_range(pair.second)
    usable = (first > 0) & (second > 0)
    factor = torch.where(usable, torch.sqrt(first * second) / second, torch.ones_like(first))
    factor = torch.where(factor.isfinite() & (factor > 0), factor, torch.ones_like(factor))
    if pair.norm is not None:
        pair.norm.weight /= factor
        if pair.norm.bias is not None:
            pair.norm.bias /= factor
    else:
        pair.first.weight /= _per_output(pair.first, factor)
        if pair.first.bias is not None:
            pair.first.bias /= factor
    pair.second.weight *= _per_input(pair.second, factor)
    return factor


def _first_range(pair: Pair) -> Tensor:
    layer = pair.first
    if isinstance(layer, nn.Linear) or not layer.transposed:
        largest = layer.weight.abs().flatten(1).amax(1)
    else:  # (in, out / groups, …) to (out,)
        grouped = layer.weight.abs().flatten(2).amax(2).reshape(layer.groups, -1, layer.weight.shape[1])
        largest = grouped.amax(1).flatten()
    if pair.norm is None:
        return largest
    return largest * (pair.norm.weight * torch.rsqrt(pair.norm.running_var + pair.norm.eps)).abs()


def _second_range(layer: Any) -> Tensor:
    weight = layer.weight.abs()
    if isinstance(layer, nn.Linear):
        return weight.amax(0)
    if layer.transposed:
        return weight.flatten(1).amax(1)
    grouped = weight.flatten(2).amax(2).reshape(layer.groups, -1, weight.shape[1])  # (groups, out, in) of each
    return grouped.amax(1).flatten()


def _per_output(layer: Any, values: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear) or not layer.transposed:
        return values.reshape(-1, *[1] * (layer.weight.ndim - 1))
    return _grouped(layer, values)


def _per_input(layer: Any, values: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return values
    return values.reshape(-1, *[1] * (layer.weight.ndim - 1)) if layer.transposed else _grouped(layer, values)


def _grouped(layer: Any, values: Tensor) -> Tensor:
    """One value per channel for the second axis of a weight whose first is divided into groups."""
    first = layer.weight.shape[0]
    spread = values.reshape(layer.groups, 1, -1).expand(-1, first // layer.groups, -1).reshape(first, -1)
    return spread.reshape(*spread.shape, *[1] * (layer.weight.ndim - 2))


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _inputs(layer: Any) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
