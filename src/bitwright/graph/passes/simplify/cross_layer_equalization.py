"""Equalize the ranges of channels across layers:  f₂(act(f₁(x)))  with  f₁/s  and  f₂·s.

For an activation with act(s·x) = s·act(x) for s > 0 (ReLU, LeakyReLU, PReLU, or none), channel i may be divided by sᵢ
after the first layer and multiplied by sᵢ in the second:

    sᵢ = √(r₁ᵢ · r₂ᵢ) / r₂ᵢ,      r₁ᵢ = max |w₁[i]|,  r₂ᵢ = max |w₂[:, i]|

after which channel i has the range √(r₁ᵢ · r₂ᵢ) in both. Chains of layers are equalized repeatedly. If
a BatchNorm follows the first layer, its weight and bias take the factor (r₁ is that of the folded weight).

Off unless asked for: it changes parameters, so the model equals the original up to rounding only, and a ``state_dict``
loaded afterwards restores the original ranges. Weights with one scale per tensor gain most, and so do depthwise
convolutions:  ``cross_layer_equalization: {iterations: 20, relu6: true}``; with ``relu6``, ReLU6 counts as ReLU:
its limit of 6 then cuts elsewhere, which changes what the model computes.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.errors import ConfigError
from bitwright.graph.facts import shape_of
from bitwright.graph.match import InputMatchType, MatcherNode
from bitwright.graph.names import module_of
from bitwright.graph.rewriting.replace import Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import between, calls_of_modules, first_input, operator_called
from bitwright.nn.channels import (
    LAYERS,
    input_channels,
    largest_per_input,
    largest_per_output,
    output_channels,
    per_input,
    per_output,
)
from bitwright.torch_internals import has_hooks


@dataclass
class Pair:
    """Two layers, and the norm between them if there is one, whose channels share a factor."""

    first: Any
    norm: Any
    second: Any
    name: str

    @property
    def modules(self) -> list[Any]:
        """All modules involved."""
        return [module for module in (self.first, self.second, self.norm) if module is not None]

    def why_unfit(self, rank: int) -> str | None:
        """Why no factor can move from the first layer, whose result has ``rank`` dimensions, to the second."""
        if self.norm is not None and isinstance(self.first, nn.Linear) and rank != 2:
            return "the norm between them is on another axis"
        if isinstance(self.first, nn.Linear) != isinstance(self.second, nn.Linear):
            return "their channels are on different axes"
        if self.norm is not None and self.norm.weight is None:
            return "the norm between them has no weight to take the factor"
        come, go = output_channels(self.first), input_channels(self.second)
        return None if come == go else f"{come} channels come out and {go} go in"

    def equalize(self) -> Tensor:
        """Move one factor per channel from the first layer to the second; return the factors."""
        first, second = self._first_range(), largest_per_input(self.second)
        usable = (first > 0) & (second > 0)
        factor = torch.where(usable, torch.sqrt(first * second) / second, torch.ones_like(first))
        factor = torch.where(factor.isfinite() & (factor > 0), factor, torch.ones_like(factor))
        taker = self.first if self.norm is None else self.norm
        taker.weight /= per_output(self.first, factor) if self.norm is None else factor
        if taker.bias is not None:
            taker.bias /= factor
        self.second.weight *= per_input(self.second, factor)
        return factor

    def _first_range(self) -> Tensor:
        largest = largest_per_output(self.first)
        if self.norm is None:
            return largest
        return largest * (self.norm.weight * torch.rsqrt(self.norm.running_var + self.norm.eps)).abs()


@register_schedule(
    "cross_layer_equalization",
    stage="simplify",
    after=("remove_identity", "remove_dropout", "fold_constants", "merge_reshapes"),
    default=False,
    tolerance=1e-4,
)
class ReplacePattern(ReplacePatternBase):
    """Equalize every pair of layers that can be, and say why the others cannot.

    Args:
        iterations: how often all pairs are equalized; stops early once nothing moves any more.
        relu6: treat ReLU6 as ReLU.
    """

    strategy = ReplaceStrategy.APPLY_INTERSECT

    def __init__(self, iterations: int = 10, relu6: bool = False) -> None:
        if iterations < 1:
            raise ConfigError(f"cross_layer_equalization: iterations must be 1 or more, not {iterations}")
        self.iterations = iterations
        self.relu6 = relu6

    def begin(self, model: fx.GraphModule) -> None:
        """Find out what else uses each layer and each parameter."""
        self.model = model
        self.pairs: list[Pair] = []
        self.calls = calls_of_modules(model)
        self.owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        targets = [str(n.target) for n in model.graph.nodes if n.op == "get_attr"]
        self.read = {model.get_submodule(target.rpartition(".")[0]): target for target in targets}

    def make_ops(self) -> list[MatcherNode]:
        return [
            MatcherNode("first", None, LAYERS, _is_float),
            MatcherNode("second", ["first"], LAYERS, _is_float, InputMatchType.FIRST, through=self._passes),
        ]

    def make_joint_checkers(self) -> list[Any]:
        """The factor must fit, and nothing else may see it."""
        return [(("first", "second"), self._fit)]

    def near_miss(self, node: fx.Node, reason: str) -> None:
        self.note(f"not equalized: {reason}")

    def get_new_graph(self, nodes_dict: Nodes, *_: object) -> None:
        """Remember the pair: all are equalized together."""
        self.pairs.append(self._pair(nodes_dict["first"], nodes_dict["second"]))

    def finish(self, model: fx.GraphModule) -> None:
        """Equalize all pairs, again and again."""
        ratios = [torch.ones(()) for _ in self.pairs]
        with torch.no_grad():
            for _ in range(self.iterations):
                moved = [pair.equalize() for pair in self.pairs]
                ratios = [r * s for r, s in zip(ratios, moved, strict=True)]
                if all(torch.allclose(s, torch.ones_like(s), atol=1e-3) for s in moved):
                    break
        for pair, ratio in zip(self.pairs, ratios, strict=True):
            low, high = float(ratio.min()), float(ratio.max())
            self.note(f"equalized {pair.name}, by factors from {low:.2g} to {high:.2g}")

    def _passes(self, node: fx.Node, instance: object) -> bool:
        """Whether a factor per channel can move past a node, or into it if it is a norm."""
        kind = operator_called(node, instance)
        if kind is None:
            return False
        norm = kind.name == "batch_norm" and node.op == "call_module"
        return norm or kind.homogeneous or kind.pool or (self.relu6 and kind.name == "relu6")

    def _between(self, first: fx.Node, second: fx.Node) -> list[tuple[fx.Node, Any]]:
        """The nodes between two layers, the last first, and the operators that they compute."""
        nodes = between(first, first_input(second) or first)
        return [(node, operator_called(node, module_of(node, self.model))) for node in nodes]

    def _pair(self, first: fx.Node, second: fx.Node) -> Pair:
        norms = [node for node, kind in self._between(first, second) if kind.name == "batch_norm"]
        one, norm, two = (module_of(n, self.model) for n in (first, norms[0] if norms else None, second))
        return Pair(one, norm, two, f"{first.target} with {second.target}")

    def _fit(self, first: fx.Node, second: fx.Node, modules: dict[str, Any]) -> bool | str:
        way = self._between(first, second)
        if any(kind.name == "batch_norm" for _, kind in way[:-1]):
            return False  # a norm takes the factor of the layer directly before it
        if isinstance(modules["second"], nn.Linear) and any(kind.pool for _, kind in way):
            return False  # a pool mixes what a linear layer treats as channels
        pair = self._pair(first, second)
        reason = self._why_seen([*dict(way), first]) or self._why_shared(pair)
        reason = reason or pair.why_unfit(len(shape_of(first) or ()))
        return True if reason is None else f"{pair.name}, {reason}"

    def _why_seen(self, nodes: list[fx.Node]) -> str | None:
        """Say what else reads a tensor that is divided by the factor."""
        split = next((node for node in nodes if len(node.users) > 1), None)
        return None if split is None else f"{split.name} has {len(split.users)} users"

    def _why_shared(self, pair: Pair) -> str | None:
        """Say what else uses a parameter that takes the factor."""
        for module in pair.modules:
            if len(self.calls[module]) > 1:
                return f"{self.calls[module][0].target} is called more than once"
            if module in self.read:
                return f"{self.read[module]} is read by something else"
            if any(self.owners[id(p)] > 1 for p in module.parameters()):
                return f"{self.calls[module][0].target} shares parameters with another layer"
        return "one of them has hooks" if has_hooks(pair.first) or has_hooks(pair.second) else None


def _is_float(_: fx.Node, module: object) -> bool:
    return type(module) in LAYERS
