"""search_bits: choose the bits of every weight under a budget, and apply the choice."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import nn

from bitwright.bit_search.damage import Damage, Metric
from bitwright.bit_search.latency import seconds_of
from bitwright.bit_search.layers import FLOAT_BITS, Layer, layers_of
from bitwright.bit_search.measured import Measured
from bitwright.bit_search.solve import Pair, choose
from bitwright.calibration import make_room_for_bias
from bitwright.columns import in_columns
from bitwright.correction.steps import undo_for_other_bits
from bitwright.distributed import TIMEOUT, all_ranks
from bitwright.errors import ConfigError, suggest
from bitwright.preparation import Ledger, ledger_of
from bitwright.progress import track
from bitwright.recipe import FLOAT, Recipe, Rule, with_bits
from bitwright.reconstruction.learned import Learned
from bitwright.spec import QuantSpec

BudgetName = Literal["size", "bit_operations", "latency", "damage"]
Latency = Mapping[str, Mapping[int, float]]
"""For each layer, the seconds that it takes with each number of bits."""


@dataclass(frozen=True)
class BitSearch:
    """What :func:`bitwright.search_bits` chose.

    Attributes:
        bits: of each layer's weight; 32 where it stays float.
        damage: the sum of each layer's damage alone, which the choice minimizes or keeps within limits.
        measured: the damage of all chosen weights together.
        size: bytes of all these weights.
        bit_operations: multiplications for one sample, times the bits of both factors.
        recipe: prepares a model this way.
        latency: seconds of all these layers, if given.
    """

    bits: dict[str, int]
    damage: float
    measured: float
    size: int
    bit_operations: int
    recipe: Recipe
    latency: float | None = None

    def __str__(self) -> str:
        head = (
            f"{self.size:,} bytes, {self.bit_operations:,} bit operations, damage {self.damage:.4g} added up and "
            f"{self.measured:.4g} together"
        )
        rows = [(name, "float" if b == FLOAT_BITS else str(b)) for name, b in self.bits.items()]
        return "\n".join([head, *in_columns(("layer", "bits"), rows)])

    __repr__ = __str__


def search_bits(
    model: nn.Module,
    batches: Iterable[Any],
    budget: Mapping[BudgetName, float],
    *,
    bits: Sequence[int] = (2, 3, 4, 6, 8),
    metric: Metric = "kl",
    latency: Latency | None = None,
    interactions: bool = False,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
) -> BitSearch:
    """Choose the bits of every quantized weight, and apply the choice to the model.

    Corrections were made for the former bits, so they are undone first: run ``bw.correct`` afterwards. Each layer's
    damage is measured for each number of bits with all else in float, one pass over the data each. An
    integer programme then finds the choice with the least damage in all, or with ``{"damage": …}`` the smallest one
    that does no more damage than that. It needs scipy: ``pip install 'bitwright[search]'``.

    Args:
        model: what ``calibrate`` returned; its weight quantizers get the specs that were chosen.
        batches: data as for ``calibrate``.
        budget: limits by name: ``"size"``, bytes of all these weights; ``"bit_operations"``, multiplications for a
            sample times the bits of weight and input; ``"latency"``, seconds by the table ``latency``; ``"damage"``,
            the largest allowed sum of all layers' damages. To find layers to skip, give a damage and ``bits=(4, 32)``,
            where 32 stands for float.
        bits: the numbers of bits to choose from; those that the backend does not have are refused.
        metric: as for :func:`bitwright.sensitivity`.
        latency: the seconds that each layer takes with each number of bits, measured where the model will run:
            ``{"conv1": {4: 1.2e-4, 8: 2.0e-4}, …}``.
        interactions: also measure the joint damage of consecutive layers, for each choice of bits of the two, and take
            it into account; with b numbers of bits, this needs b² more passes for each pair.
        progress: show a progress bar; by default only on a terminal.
        checkpoint: as for :func:`bitwright.sensitivity`; written after each number of bits of each layer. Another
            budget and other bits may use the same.
        timeout: how long a rank waits for the others, in seconds.
    """
    _check(budget, bits, metric)
    if ("latency" in budget) != (latency is not None):
        raise ConfigError("a latency budget and the table latency={layer: {bits: seconds}} need each other")
    undo_for_other_bits(model)
    with all_ranks(timeout) as ranks:
        return _search(
            model, Damage(model, batches, metric, ranks), budget, bits, latency, interactions, progress, checkpoint
        )


def _search(
    model: nn.Module,
    damage: Damage,
    budget: Mapping[BudgetName, float],
    bits: Sequence[int],
    latency: Latency | None,
    interactions: bool,
    progress: bool | None,
    checkpoint: str | os.PathLike[str] | None,
) -> BitSearch:
    ledger = ledger_of(model)
    layers = _integer_layers(model, ledger)
    seconds = None if latency is None else seconds_of([layer.name for layer in layers], bits, latency)
    specs = {layer: [_spec(layer, b, ledger) for b in bits] for layer in layers}
    known = Measured(damage, "bits", checkpoint)
    shown = track(layers, "measuring", show=progress)
    damages = [_damages(layer, dict(zip(bits, specs[layer], strict=True)), damage, known) for layer in shown]
    pairs = _pairs(layers, specs, bits, damages, damage, known) if interactions else []
    options = dict(zip(layers, _choose(layers, bits, damages, seconds, budget, pairs), strict=True))
    chosen = {layer: specs[layer][option] for layer, option in options.items()}
    _apply(chosen)
    return BitSearch(
        {layer.name: bits[option] for layer, option in options.items()},
        _added_up(damages, pairs, list(options.values())),
        damage.of([layer.site.quantizer for layer in layers]),
        sum(layer.size(bits[option]) for layer, option in options.items()),
        sum(layer.bit_operations(bits[option]) for layer, option in options.items()),
        _recipe(ledger, chosen),
        None if seconds is None else _added_up(seconds, (), list(options.values())),
    )


def _check(budget: Mapping[BudgetName, float], bits: Sequence[int], metric: Metric) -> None:
    _check_budget(budget)
    known = list(bits) if isinstance(bits, Sequence) else []
    if not known or any(not isinstance(b, int) or not (2 <= b <= 16 or b == FLOAT_BITS) for b in known):
        raise ConfigError(f"bits must be a list of numbers from 2 to 16, or {FLOAT_BITS} for float, not {bits!r}")
    if metric == "sqnr":
        raise ConfigError("decibels of layers cannot be added up: search by the metric 'mse' or 'kl'")


def _check_budget(budget: Mapping[BudgetName, float]) -> None:
    known = get_args(BudgetName)
    if not isinstance(budget, Mapping) or not budget:
        raise ConfigError(f"the budget must be a mapping of limits such as {{'size': 500_000}}, not {budget!r}")
    for name, limit in budget.items():
        if name not in known:
            raise ConfigError(f"the budget cannot limit {name!r}{suggest(str(name), known)}")
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise ConfigError(f"the budget of {name} must be a number, not {limit!r}")


def _integer_layers(model: nn.Module, ledger: Ledger) -> list[Layer]:
    """The layers whose bits can be chosen, or an error if there are none or one has learned its rounding."""
    layers = [layer for layer in layers_of(model, ledger.example) if not layer.site.quantizer.spec.format.floating]
    if not layers:
        raise ConfigError("the model has no integer weights to choose bits for")
    for layer in layers:
        if getattr(layer.site.quantizer.method, "rounding", None) is not None:
            raise ConfigError(
                f"the rounding of {layer.name!r} was learned for its current bits: search bits before that"
            )
    return layers


def _spec(layer: Layer, bits: int, ledger: Ledger) -> QuantSpec | None:
    """The layer's spec with this many bits, None for float; raises if the backend does not have it."""
    if bits == FLOAT_BITS:
        return None
    spec = with_bits(layer.site.quantizer.spec, bits)
    why = ledger.backend.why_not("weights", spec)
    if why is not None and bits != layer.bits:
        raise ConfigError(f"{ledger.backend.name} has no weights of {bits} bits: {why}")
    return spec


class _Former:
    """A layer's original quantizer, and how to change it."""

    def __init__(self, layer: Layer) -> None:
        self.site, self.quantizer = layer.site, layer.site.quantizer
        self.spec = self.quantizer.spec
        self.state = Learned(layer.name, self.quantizer)
        self.state.remember()

    def change(self, spec: QuantSpec | None) -> None:
        """Quantize with another spec and the range that the observer finds; None leaves the weight float."""
        self.restore()
        if spec is None:
            self.quantizer.disable()
        elif spec != self.spec:
            self.quantizer.change_spec(spec)
            self.site.find_range()

    def restore(self) -> None:
        """Restore the quantizer."""
        self.quantizer.enable()
        if self.quantizer.spec != self.spec:
            self.quantizer.change_spec(self.spec)
        self.state.restore()


def _damages(layer: Layer, specs: Mapping[int, QuantSpec | None], damage: Damage, known: Measured) -> list[float]:
    """The damage of a layer alone with each of the specs, by their bits."""
    former = _Former(layer)

    def measure(spec: QuantSpec | None) -> float:
        try:
            former.change(spec)
            return damage.of([layer.site.quantizer])
        finally:
            former.restore()

    return [known.get(f"{layer.name}:{bits}", partial(measure, spec)) for bits, spec in specs.items()]


def _apply(chosen: Mapping[Layer, QuantSpec | None]) -> None:
    for layer, spec in chosen.items():
        _Former(layer).change(spec)
        make_room_for_bias(layer.site.layer)


def _choose(
    layers: Sequence[Layer],
    bits: Sequence[int],
    damages: list[list[float]],
    seconds: list[list[float]] | None,
    budget: Mapping[BudgetName, float],
    pairs: Sequence[Pair],
) -> list[int]:
    tables = {
        "size": [[float(layer.size(b)) for b in bits] for layer in layers],
        "bit_operations": [[float(layer.bit_operations(b)) for b in bits] for layer in layers],
        "latency": seconds or [],
        "damage": [[max(d, 0.0) for d in row] for row in damages],
    }
    aim = "damage" if "damage" not in budget else "size"
    limits = [(name, tables[name], float(limit)) for name, limit in budget.items()]
    return choose(tables[aim], limits, pairs, "" if aim == "damage" else "damage")


def _pairs(
    layers: Sequence[Layer],
    specs: Mapping[Layer, list[QuantSpec | None]],
    bits: Sequence[int],
    damages: list[list[float]],
    damage: Damage,
    known: Measured,
) -> list[Pair]:
    """The joint damage of each layer and the next, beyond the sum of each alone, for all bits."""
    found: list[Pair] = []
    for i, (one, two) in enumerate(pairwise(layers)):
        table = [
            [
                known.get(f"{one.name}:{bits[a]}+{two.name}:{bits[b]}", partial(_together, {one: x, two: y}, damage))
                - max(damages[i][a], 0.0)
                - max(damages[i + 1][b], 0.0)
                for b, y in enumerate(specs[two])
            ]
            for a, x in enumerate(specs[one])
        ]
        found.append((i, i + 1, table))
    return found


def _together(chosen: Mapping[Layer, QuantSpec | None], damage: Damage) -> float:
    formers = {layer: _Former(layer) for layer in chosen}
    try:
        for layer, spec in chosen.items():
            formers[layer].change(spec)
        return damage.of([layer.site.quantizer for layer in chosen])
    finally:
        for former in formers.values():
            former.restore()


def _added_up(damages: list[list[float]], pairs: Sequence[Pair], options: list[int]) -> float:
    alone = [row[option] for row, option in zip(damages, options, strict=True)]
    return sum(alone) + sum(table[options[i]][options[j]] for i, j, table in pairs)


def _recipe(ledger: Ledger, chosen: Mapping[Layer, QuantSpec | None]) -> Recipe:
    """The model's recipe with a rule for each layer, keeping its earlier rule's settings for other tensors."""
    recipe, rules = ledger.recipe, []
    won = {entry.name: entry.rule for entry in ledger.entries}
    for layer, spec in chosen.items():
        former = next((r for r in recipe.rules if r.match == won.get(layer.name)), Rule(match=layer.name))
        weight = former.weight.model_copy(update={"spec": FLOAT if spec is None else spec, "bits": None})
        rules.append(former.model_copy(update={"match": layer.name, "weight": weight, "optional": False}))
    return recipe.model_copy(update={"rules": (*recipe.rules, *rules)})
