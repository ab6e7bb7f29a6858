"""Run ``torch.onnx.export(dynamo=True)`` on a deployed model, with sizes left free where the model allows it."""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.exporting.onnx.quiet import quiet_exporter
from bitwright.exporting.onnx.translate import translations
from bitwright.graph import Inputs
from bitwright.graph.inputs import bind_inputs, flat_inputs

_log = logging.getLogger("bitwright.exporting")
BATCH = "batch"
Size = int | str


def export_program(twin: nn.Module, inputs: Inputs, opset: int, dynamic_shapes: Any) -> Any:  # noqa: ANN401
    """The exporter's model, not optimized yet.

    Args:
        twin: the deployed model.
        inputs: to export with.
        opset: the version of ONNX.
        dynamic_shapes: True leaves free what the model takes in other sizes, False nothing; or as in ``torch.export``.
    """
    sizes = _Sizes(twin, inputs)
    free = sizes.free() if dynamic_shapes is True else []
    reason = "it was made for the example's batch size"
    while free:
        try:
            model = _export(twin, sizes.inputs, opset, sizes.shapes(free))
            break
        except Exception as error:
            reason = last_line(error)
            _log.info("not exported with %s free: %s", f"sizes of {free[-1]}", reason)
            free.pop()
    else:
        try:
            model = _export(twin, inputs, opset, None if isinstance(dynamic_shapes, bool) else dynamic_shapes)
        except Exception as error:
            raise ExportError(f"the exporter refused the model: {last_line(error)}") from error
    if BATCH not in _name_sizes(model, list(flat_inputs(twin, inputs))) and dynamic_shapes is True:
        _log.warning("the file has a fixed batch size, as the model does not take others: %s", reason)
    return model


class _Sizes:
    """The sizes of a model's inputs, of at least two samples: the exporter takes a size of one for a constant.

    What is equal is one size, wherever inputs have it; the batch size is one of its own.
    """

    def __init__(self, twin: nn.Module, inputs: Inputs) -> None:
        def double(x: Tensor) -> Tensor:
            return torch.cat([x, x]) if x.ndim and x.shape[0] == 1 else x

        self.twin = twin
        self.inputs = Inputs(_map(inputs.args, double), _map(inputs.kwargs, double))
        self.tensors = list(flat_inputs(twin, self.inputs).values())
        self.batch = next((t.shape[0] for t in self.tensors if t.ndim), 0)

    def free(self) -> list[Size]:
        """The sizes that the model takes doubled, or halved; the batch size first."""
        sizes = {self._size(axis, n) for t in self.tensors for axis, n in enumerate(t.shape) if n > 1}
        return [s for s in sorted(sizes, key=str, reverse=True) if self._takes(s, 2) or self._takes(s, 0.5)]

    def shapes(self, free: list[Size]) -> Any:  # noqa: ANN401
        """Shapes as the exporter takes them; it fixes those that it cannot leave free."""

        def shape(x: Tensor) -> dict[int, Any]:
            return {axis: torch.export.Dim.AUTO for axis, n in enumerate(x.shape) if self._size(axis, n) in free}

        return _map(bind_inputs(self.twin, self.inputs.args, self.inputs.kwargs), shape, lambda _: None)

    def _size(self, axis: int, size: int) -> Size:
        return BATCH if axis == 0 and size == self.batch else size

    def _takes(self, size: Size, factor: float) -> bool:
        def resize(x: Tensor) -> Tensor:
            for axis in [a for a, n in enumerate(x.shape) if self._size(a, n) == size]:
                x = torch.cat([x, x], axis).narrow(axis, 0, int(x.shape[axis] * factor))
            return x

        try:
            with torch.no_grad():
                self.twin(*_map(self.inputs.args, resize), **_map(self.inputs.kwargs, resize))
        except Exception:  # whatever the model or its guards say: it takes no other
            return False
        return True


def _map(value: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda v: v) -> Any:  # noqa: ANN401
    """Apply a function to all tensors of inputs, and another to everything else."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(item, function, other) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function, other) for item in value)
    return other(value)


def _export(twin: nn.Module, inputs: Inputs, opset: int, shapes: Any) -> Any:  # noqa: ANN401
    with quiet_exporter(), torch.no_grad():
        program: Any = torch.onnx.export(
            twin,
            inputs.args if inputs.kwargs else (*inputs.args, {}),  # torch takes a dict at the end for kwargs
            kwargs=inputs.kwargs,
            dynamic_shapes=shapes,
            dynamo=True,
            optimize=False,
            opset_version=opset,
            custom_translation_table=translations(opset, twin),
            verbose=False,
            input_names=list(flat_inputs(twin, inputs)),
        )
    return program.model


def _name_sizes(model: Any, arguments: list[str]) -> set[str]:  # noqa: ANN401
    """Name the free sizes after the inputs that have them first; return the names."""
    names: dict[str, str] = {}
    for argument, value in zip(arguments, model.graph.inputs, strict=False):
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value and size.value.isidentifier():
                first = BATCH not in names.values() and axis == 0
                names.setdefault(size.value, BATCH if first else f"{argument}_{axis}")
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value:
                value.shape[axis] = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), size.value)
    return set(names.values())


def last_line(error: BaseException) -> str:
    """The first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
