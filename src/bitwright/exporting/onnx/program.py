"""Run ``torch.onnx.export(dynamo=True)`` on a deployed model, with sizes left free where the model allows it."""

import logging
from typing import Any

import torch
from torch import nn

from bitwright.errors import ExportError
from bitwright.exporting.onnx.fixed_sizes import fixed_sizes
from bitwright.exporting.onnx.quiet import quiet_exporter
from bitwright.exporting.onnx.translate import translations
from bitwright.exporting.plain_recurrent import WholeRecurrentLayers
from bitwright.exporting.sizes import BATCH, Sizes, WishedSizes, name_sizes
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs
from bitwright.graph.model import inputs_as_arguments
from bitwright.graph.walks import reached_from

_log = logging.getLogger("bitwright.exporting")


def export_program(twin: nn.Module, inputs: Inputs, opset: int, dynamic_shapes: Any, *, pack: bool) -> Any:
    """Export to an ONNX model that is not optimized yet.

    ``dynamic_shapes`` may be True, which leaves free all sizes that the model accepts in other values.
    """
    with inputs_as_arguments(twin):
        return _export_program(twin, inputs, opset, dynamic_shapes, pack=pack)


def _export_program(twin: nn.Module, inputs: Inputs, opset: int, dynamic_shapes: Any, *, pack: bool) -> Any:
    inputs = inputs.in_order(twin)  # torch names what it lists in the order given
    wished = None if isinstance(dynamic_shapes, bool) else WishedSizes(twin, inputs, dynamic_shapes)
    model, reason = None, "it was made for the example's batch size"
    if dynamic_shapes is True:
        model, reason = _with_free_sizes(twin, inputs, opset, pack, reason)
    if model is None:
        try:
            given, shapes = (inputs, None) if wished is None else (wished.inputs, wished.shapes)
            model = _export(twin, given, opset, pack, shapes)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"the exporter refused the model: {last_line(error)}") from error
    names = name_sizes(model, list(flat_inputs(twin, inputs)), {} if wished is None else wished.names)
    if BATCH not in names and dynamic_shapes is True:
        _log.warning("the file has a fixed batch size because the model accepts no other: %s", reason)
    return model


def _with_free_sizes(twin: nn.Module, inputs: Inputs, opset: int, pack: bool, reason: str) -> tuple[Any, str]:
    """The model with as many free sizes as the exporter accepts, or None and why it accepts none."""
    sizes = Sizes(twin, inputs, fixed_sizes)
    free = sizes.free()
    while free:
        try:
            return _export(twin, sizes.inputs, opset, pack, sizes.shapes(free)), reason
        except ExportError:
            raise
        except Exception as error:
            reason = last_line(error)
            _log.info("not exported with %s free: %s", f"sizes of {free[-1]}", reason)
            free.pop()
    return None, reason


def _export(twin: nn.Module, inputs: Inputs, opset: int, pack: bool, shapes: Any) -> Any:
    with quiet_exporter(), WholeRecurrentLayers(), torch.no_grad():
        program: Any = torch.onnx.export(
            twin,
            inputs.args if inputs.kwargs else (*inputs.args, {}),  # torch mistakes a dict at the end for kwargs
            kwargs=inputs.kwargs,
            dynamic_shapes=shapes,
            dynamo=True,
            optimize=False,
            opset_version=opset,
            custom_translation_table=translations(opset, twin, pack=pack),
            verbose=False,
            input_names=list(flat_inputs(twin, inputs)),
        )
    _refuse_state(program.exported_program)
    return program.model


def _refuse_state(program: Any) -> None:
    """Refuse a model whose results depend on buffers that it changes; a counter that nothing reads is fine."""
    changed = set(program.graph_signature.buffers_to_mutate.values())
    results = set(program.graph_signature.user_outputs)
    for node in program.graph.find_nodes(op="placeholder"):
        buffer = program.graph_signature.inputs_to_buffers.get(node.name)
        if buffer in changed and any(reached.name in results for reached in reached_from(node, lambda n: n.users)):
            raise ExportError(
                f"the model changes its buffer {buffer!r} whenever it runs, and its results depend on it: a file keeps "
                "nothing from one run to the next; take the value as an input and return the new one"
            )


def last_line(error: BaseException) -> str:
    """The first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
