"""The whole model: as a graph of one call where its forward could not be captured, and how far it is from float."""

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from bitwright.distributed import Ranks
from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.facts import set_value
from bitwright.graph.inputs import bind_inputs, caller
from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.switch import switched_off


class _Flat(nn.Module):
    """Calls a model with the values of its inputs in order, and gives the tensors in its result as a tuple."""

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.model = model
        self.names = list(bind_inputs(model, example.args, example.kwargs))
        self._call = caller(model, example.args, example.kwargs)

    def forward(self, *values: object) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self._call(self.model, dict(zip(self.names, values, strict=True)))))


def graph_of(model: nn.Module, example: Inputs) -> fx.GraphModule:
    """The graph of a captured model, or one that calls the model as it is."""
    if isinstance(model, CapturedModel):
        return model
    flat = _Flat(model, example)
    with torch.no_grad():
        results = flat(*bind_inputs(model, example.args, example.kwargs).values())
    graph = fx.Graph()
    call = graph.call_module("flat", tuple(graph.placeholder(name) for name in flat.names))
    parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    for node, value in zip(parts, results, strict=True):
        set_value(node, value)
    graph.output(tuple(parts))
    return fx.GraphModule({"flat": flat}, graph)


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def outputs_apart(
    model: nn.Module, exact: nn.Module, batches: Sequence[Inputs], quantizers: Iterable[TensorQuantizer], ranks: Ranks
) -> float:
    """The squared distance of a model's results from those in float, in units of the latter's squares."""
    found, apart, power = list(quantizers), 0.0, 0.0
    for batch in batches:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):  # learning draws the numbers that it would without this
            results = tensors_in(batch.run(model))
            with switched_off(found):
                wanted = tensors_in(batch.run(exact))
        for result, value in zip(results, wanted, strict=True):
            known = value.isfinite() & result.isfinite()
            result, value = (v.double()[known] for v in (result, value))
            apart, power = apart + float((result - value).square().sum()), power + float(value.square().sum())
    apart, power = ranks.sum([apart, power])
    return apart / max(power, 1e-30)
