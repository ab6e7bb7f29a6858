"""Flow: take the data through the units of a model one by one, in float and quantized, each value computed once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.facts import is_floating
from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.columns import Column, Memory
from bitwright.reconstruction.fisher import Importance
from bitwright.reconstruction.layout import takes_channels_last
from bitwright.reconstruction.rest import Rest
from bitwright.reconstruction.samples import Samples
from bitwright.reconstruction.subgraph import subgraph
from bitwright.reconstruction.switch import switched_off
from bitwright.reconstruction.units import Unit


class Flow:
    """The values on the border between units that are done and units to come.

    In float, ``original``, the graph before it was corrected or the graph itself, is what the model should approach.
    """

    def __init__(
        self,
        model: fx.GraphModule,
        original: fx.GraphModule,
        units: Sequence[Unit],
        inputs: Sequence[Mapping[str, Any]],
        quantizers: Sequence[TensorQuantizer],
        memory: Memory,
    ) -> None:
        self.model, self.units, self.quantizers, self.memory = model, units, quantizers, memory
        self.calls, self.float_calls = (
            [subgraph(root, unit.nodes, unit.inputs, unit.outputs) for unit in units] for root in (model, original)
        )
        last = next(n for n in reversed(model.graph.nodes) if n.op == "output")
        self.ends = [n for n in last.all_input_nodes if n.op not in ("placeholder", "get_attr")]
        self._last_reader = {node: number for number, unit in enumerate(units) for node in unit.inputs}
        self.sizes = [_samples(values.values()) for values in inputs]
        self._last = False
        self.exact: dict[fx.Node, Column] = {}
        self.quantized: dict[fx.Node, Column] = {}
        for node in (n for n in model.graph.nodes if n.op == "placeholder"):
            default = node.args[0] if node.args else None
            self.exact[node] = self._filled(values.get(str(node.target), default) for values in inputs)
            self.quantized[node] = self.exact[node]
        with torch.no_grad(), switched_off(quantizers):
            begin = {node: column.batch(0) for node, column in self.exact.items()}
            self._last = takes_channels_last(model, units, self.float_calls, begin, self._last_reader)

    def enter(self, number: int) -> None:
        """Compute the float results of a unit."""
        unit = self.units[number]
        with switched_off(self.quantizers):
            self._compute(self.float_calls[number], unit, self.exact, unit.outputs)

    def targets(self, number: int) -> list[fx.Node]:
        """The results of a unit that quantization changes and that can be compared."""
        unit = self.units[number]
        return [node for node in unit.outputs if node in unit.moving and is_floating(node)]

    def samples(self, number: int, *, predictions: bool = False) -> Samples:
        """The data of a unit that was entered, with the model's float results if they count."""
        unit = self.units[number]
        quantized, exact = ([side[node] for node in unit.inputs] for side in (self.quantized, self.exact))
        chosen = [i for i, node in enumerate(unit.outputs) if node in self.targets(number)]

        def in_float(*values: object) -> list[Any]:
            with torch.no_grad(), switched_off(self.quantizers):
                results = self.float_calls[number](*values)
            return [results[i] for i in chosen]

        rest = self._rest(number) if predictions else None
        return Samples(quantized, exact, [self.exact[unit.outputs[i]] for i in chosen], in_float, rest)

    def _rest(self, number: int) -> Rest | None:
        """The units after one, unless none of the model's results comes from them."""
        later = list(zip(self.units, self.float_calls, strict=True))[number + 1 :]
        sides = self.exact, self.quantized
        found = Rest(later, self.quantizers, self.targets(number), self.ends, sides, self._filled)
        return found if found.ends else None

    def leave(self, number: int) -> None:
        """Compute the quantized results of a unit, and forget what no later unit reads."""
        unit = self.units[number]
        for node in unit.outputs:
            if node not in unit.moving:
                self.quantized[node] = self.exact[node]
        self._compute(self.calls[number], unit, self.quantized, [node for node in unit.outputs if node in unit.moving])
        for node in [n for n in self.exact if self._last_reader.get(n, -1) <= number]:
            for column in {self.exact.pop(node), self.quantized.pop(node)}:
                column.free()

    def importance(self) -> Importance:
        """Compute how much each value of each unit's results matters for the predictions."""
        found = Importance()
        for number in range(len(self.sizes)):
            with torch.no_grad(), switched_off(self.quantizers):
                wanted = self._through(self.float_calls, number, lambda value: value)
            seen: dict[Hashable, torch.Tensor] = {}
            with torch.enable_grad():
                values = self._through(self.calls, number, _leaf)
                for unit in self.units:
                    seen |= {n: values[n] for n in unit.outputs if isinstance(values[n], torch.Tensor)}
                found.add(seen, *([each[n] for n in self.ends] for each in (values, wanted)))
        return found

    def _through(self, calls: Sequence[nn.Module], batch: int, mark: Callable[[Any], Any]) -> dict[fx.Node, Any]:
        values = {node: column.batch(batch) for node, column in self.exact.items()}
        for unit, call in zip(self.units, calls, strict=True):
            results = call(*(values[node] for node in unit.inputs))
            values |= {node: mark(result) for node, result in zip(unit.outputs, results, strict=True)}
        return values

    def _compute(self, call: nn.Module, unit: Unit, side: dict[fx.Node, Column], wanted: Sequence[fx.Node]) -> None:
        columns = {node: Column(self.sizes, self.memory, last=self._last) for node in wanted}
        for batch in range(len(self.sizes)):
            with torch.no_grad():
                results = call(*(side[node].batch(batch) for node in unit.inputs))
            for node, result in zip(unit.outputs, results, strict=True):
                if node in columns:
                    columns[node].append(result)
        side.update(columns)

    def _filled(self, values: Any) -> Column:  # noqa: ANN401
        column = Column(self.sizes, self.memory)
        for value in values:
            column.append(value)
        return column


def _leaf(value: object) -> Any:  # noqa: ANN401
    """A tensor that requires a gradient, unless something before it already does."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _samples(values: Any) -> int:  # noqa: ANN401
    """The number of samples in a batch: the length of its first tensor."""
    return next((len(v) for v in values if isinstance(v, torch.Tensor) and v.ndim), 1)
