"""Rest: the float model's predictions from a unit's results, for a loss on them (PD-Quant; Liu et al. 2023)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.columns import Column
from bitwright.reconstruction.switch import switched_off
from bitwright.reconstruction.units import Unit


class Rest:
    """The units after one, in float.

    Args:
        targets: the results of the unit before them that depend on what it learns.
        sides: the values that are alive in the float and in the quantized model.

    Attributes:
        others: what the units read besides the targets, as the quantized model has it.
        exact_others: the same as the float model has it.
        predictions: the results in float.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, nn.Module]],
        quantizers: Sequence[TensorQuantizer],
        targets: Sequence[fx.Node],
        ends: Sequence[fx.Node],
        sides: tuple[Mapping[fx.Node, Column], Mapping[fx.Node, Column]],
        columns: object,
    ) -> None:
        self.units, self.quantizers, self.targets = units, quantizers, tuple(targets)
        made = {node for unit, _ in units for node in unit.outputs} | set(targets)
        self.ends = [node for node in ends if node in made]
        read = dict.fromkeys(node for unit, _ in units for node in unit.inputs if node not in made)
        exact, quantized = sides
        self.nodes = tuple(read)
        self.exact_others = [exact[node] for node in read]
        self.others = [quantized.get(node, exact[node]) for node in read]
        self.predictions = self._in_float([exact[node] for node in targets], columns)

    def __call__(self, results: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        values = dict(zip((*self.targets, *self.nodes), (*results, *others), strict=True))
        with switched_off(self.quantizers):
            for unit, call in self.units:
                found = call(*(values[node] for node in unit.inputs))
                values |= zip(unit.outputs, found, strict=True)
        return [values[node] for node in self.ends]

    def _in_float(self, targets: Sequence[Column], columns: Any) -> list[Column]:  # noqa: ANN401
        count = len(targets[0].values)

        def batches() -> Iterable[list[Any]]:
            for number in range(count):
                with torch.no_grad():
                    yield self(*([c.batch(number) for c in side] for side in (targets, self.exact_others)))

        found = list(batches())
        return [columns(batch[i] for batch in found) for i in range(len(self.ends))]
