"""sensitivity: how each layer's quantization affects the model's results, alone and on top of all before it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from bitwright.bit_search.damage import Damage, Metric
from bitwright.bit_search.layers import layers_of
from bitwright.bit_search.measured import Measured
from bitwright.columns import in_columns
from bitwright.correction.reference import uncorrected
from bitwright.distributed import TIMEOUT, all_ranks
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers


@dataclass(frozen=True)
class LayerDamage:
    """One layer, or one activation that is not a layer's input.

    Attributes:
        name: the layer, or the activation's label.
        bits: of its weight and its input, such as ``W4A8``.
        alone: the damage if only this is quantized.
        cumulative: the damage if this and all before it are quantized; None if not requested.
    """

    name: str
    bits: str
    alone: float
    cumulative: float | None


@dataclass(frozen=True)
class Sensitivity:
    """The findings of :func:`bitwright.sensitivity`, in model order; ``print`` shows the worst first."""

    metric: str
    layers: tuple[LayerDamage, ...]

    def worst(self) -> list[LayerDamage]:
        """The layers, the most damaging first."""
        return sorted(self.layers, key=lambda layer: -layer.alone)

    def __str__(self) -> str:
        header = ("layer", "bits", f"{self.metric} alone", "cumulative")
        rows = [
            (each.name, each.bits, f"{each.alone:.4g}", "" if each.cumulative is None else f"{each.cumulative:.4g}")
            for each in self.worst()
        ]
        return "\n".join(in_columns(header, rows))

    __repr__ = __str__


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric = "kl",
    *,
    cumulative: bool = False,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
) -> Sensitivity:
    """Quantize one layer at a time and measure how far the model's results move from the float model's.

    A model that was corrected is measured as it was before, because corrections change all layers together. Takes one
    pass over the data for the float results and one for each layer, or two with ``cumulative``. Under ``torchrun`` each
    rank gives its own share of the data, and all get the damages of the whole, to the bit.

    Args:
        model: a calibrated model; it is unchanged afterwards.
        batches: data as for ``calibrate``.
        metric: ``"kl"``, ``"mse"``, ``"sqnr"``, or a function of the model that returns a score, such as its accuracy.
            More damage is always worse; for a score, it is how much the score falls.
        cumulative: also measure each layer together with all before it.
        progress: show a progress bar; by default only on a terminal.
        checkpoint: a folder for the measurements, written after each layer; the same call continues from there. A
            checkpoint of another model, recipe, metric or data set is refused.
        timeout: how long a rank waits for the others, in seconds.
    """
    with all_ranks(timeout) as ranks, uncorrected(model):
        damage = Damage(model, batches, metric, ranks)
        groups = _groups(model, damage)
        known = Measured(damage, "sensitivity", checkpoint)
        found, before = [], []
        for name, (bits, group) in track(groups.items(), "measuring", show=progress):
            before += group
            alone = known.get(f"alone:{name}", partial(damage.of, group))
            together = known.get(f"all:{name}", partial(damage.of, before)) if cumulative else None
            found.append(LayerDamage(name, bits, alone, together))
    return Sensitivity(metric if isinstance(metric, str) else "drop", tuple(found))


def _groups(model: nn.Module, damage: Damage) -> dict[str, tuple[str, list[TensorQuantizer]]]:
    """The quantizers of each layer, then those that belong to none."""
    groups: dict[str, tuple[str, list[TensorQuantizer]]] = {}
    for layer in layers_of(model, ledger_of(model).example):
        inputs = [] if layer.input is None else [layer.input]
        word = f"W{layer.bits}" + (f"A{layer.input.spec.bits}" if layer.input is not None else "")
        groups[layer.name] = (word, [layer.site.quantizer, *inputs])
    taken = {q for _, group in groups.values() for q in group}
    for name, quantizer in quantizers(model).items():
        if quantizer in damage.active and quantizer not in taken:
            groups[quantizer.label or name] = (f"A{quantizer.spec.bits}", [quantizer])
    return groups
