"""Run ``torch.onnx.export(dynamo=True)`` on a deployed model, with a free batch size where the model allows it."""

import logging
from typing import Any

import torch
from torch import nn

from bitwright.errors import ExportError
from bitwright.exporting.onnx.quiet import quiet_exporter
from bitwright.exporting.onnx.translate import translations
from bitwright.graph import Inputs
from bitwright.graph.inputs import bind_inputs, flat_inputs

_log = logging.getLogger("bitwright.exporting")


def export_program(twin: nn.Module, inputs: Inputs, opset: int, *, dynamic_batch: bool) -> Any:  # noqa: ANN401
    """The exporter's model, not optimized yet."""
    doubled, shapes = _dynamic(twin, inputs) if dynamic_batch else (inputs, None)
    reason = ""
    if shapes is not None:
        try:
            model = _export(twin, doubled, opset, shapes)
            if any(not isinstance(i.shape[0], int) for i in model.graph.inputs if i.shape):
                return model
            reason = "it was made for the example's batch size"
        except Exception as error:
            reason = last_line(error)
    try:
        model = _export(twin, inputs, opset, None)
    except Exception as error:
        raise ExportError(f"the exporter refused the model: {last_line(error)}") from error
    if reason:
        _log.warning("the file has a fixed batch size, as the model does not take others: %s", reason)
    return model


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


def _dynamic(twin: nn.Module, inputs: Inputs) -> tuple[Inputs, Any]:
    """Inputs of at least two samples (one would be taken for a constant), and which of their dimensions are free."""
    named = bind_inputs(twin, inputs.args, inputs.kwargs)
    sizes = [v.shape[0] for v in named.values() if isinstance(v, torch.Tensor) and v.ndim]
    if not sizes:
        return inputs, None
    batch = sizes[0]
    dim = torch.export.Dim("batch")

    def is_batched(value: Any) -> bool:  # noqa: ANN401
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch

    def double(value: Any) -> Any:  # noqa: ANN401
        return torch.cat([value, value]) if is_batched(value) and batch == 1 else value

    doubled = Inputs(tuple(double(a) for a in inputs.args), {k: double(v) for k, v in inputs.kwargs.items()})
    free = {name: {0: dim} if is_batched(value) else None for name, value in named.items()}
    return doubled, free


def last_line(error: BaseException) -> str:
    """The first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
