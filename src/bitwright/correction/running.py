"""Run a prepared model for correctors: over batches, in float, with hooks, and up to one layer."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calibration import as_batches, as_inputs
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import Original
from bitwright.errors import CalibrationError
from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.preparation import ledger_of
from bitwright.progress import track

Layer = Any  # a QuantLayer, which is also a torch module
Hook = Callable[[Layer, Tensor], Tensor | None]


class Stop(Exception):
    """Raised by a hook that has seen enough of a pass."""


def quantized_layers(model: nn.Module, done: Correction) -> dict[str, Layer]:
    """The layers with their own quantized weights, by name; raises if the model is not calibrated.

    Functions whose weight is an argument are noted as skipped.
    """
    named = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
    found = {name: layer for name, layer in named.items() if layer.weight_quantizer.quantizes}
    if named and not found:
        raise CalibrationError("no layer of the model quantizes its weight: calibrate it first")
    functions = [name for name, layer in found.items() if isinstance(layer, QuantFunction)]
    done.skipped |= dict.fromkeys(functions, "it is a function whose weight is an argument")
    return {name: layer for name, layer in found.items() if name not in functions}


def calls(model: nn.Module, batches: Iterable[Any], what: str, progress: bool | None = None) -> Iterator[Inputs]:
    """The batches as calls of the model."""
    count, number = len(ledger_of(model).example.args), 0
    for batch in track(as_batches(batches), what, show=progress):
        number += 1
        yield as_inputs(batch, count)
    if not number:
        raise CalibrationError(f"{what}: the data is empty, or can be read only once: pass a list")


def first_samples(batches: Iterable[Any], count: int) -> list[Any]:
    """The first batches, until they have so many samples."""
    chosen: list[Any] = []
    for batch in as_batches(batches):
        chosen.append(batch)
        count -= samples_in(batch)
        if count <= 0:
            break
    return chosen


def samples_in(batch: object) -> int:
    """The samples of a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return next((samples_in(item) for item in items if isinstance(item, Tensor)), 1)


def run(model: nn.Module, inputs: Inputs) -> Any:  # noqa: ANN401
    """Run a model on one batch, up to a hook that raises :class:`Stop`."""
    with torch.no_grad(), eval_mode(model):
        try:
            return inputs.run(model)
        except Stop:
            return None


@contextmanager
def seeing_outputs(layers: Iterable[Layer], see: Hook) -> Generator[None, None, None]:
    """Show ``see`` each layer with its results, which its return value replaces."""
    with ExitStack() as undo:
        for layer in layers:
            hook: Any = lambda module, _, result: see(module, result)  # noqa: E731
            undo.callback(layer.register_forward_hook(hook).remove)
        yield


@contextmanager
def seeing_inputs(layers: Iterable[Layer], see: Hook) -> Generator[None, None, None]:
    """Show ``see`` each layer with its operator's input: quantized, and padded by reflection or the like."""

    def look(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["input"]
        see(layer, layer.arrange(layer.input_quantizer(given)))

    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield


def in_order(model: nn.Module, inputs: Inputs, layers: Iterable[Layer]) -> dict[Layer, int]:
    """The layers in execution order, and how often each runs in one call."""
    seen: dict[Layer, int] = {}

    def count(layer: Layer, _: Tensor) -> None:
        seen[layer] = seen.get(layer, 0) + 1

    with seeing_outputs(layers, count):
        run(model, inputs)
    return seen


def outputs_apart(model: nn.Module, original: Original, batches: Iterable[Any]) -> float:
    """The squared distance of the model's outputs from those in float, in units of the latter's squares."""
    apart = size = 0.0
    for inputs in calls(model, batches, "comparing outputs", progress=False):
        wanted = tensors_in(original.run(model, inputs))
        for found, value in zip(tensors_in(run(model, inputs)), wanted, strict=True):
            apart += float((found - value).double().square().sum())
            size += float(value.double().square().sum())
    return apart / max(size, 1e-30)


def tensors_in(value: object) -> list[Tensor]:
    """The floating tensors in a result, however nested."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
