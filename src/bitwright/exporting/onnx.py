"""Export to ONNX: through ``torch.onnx.export(dynamo=True)``, then named after the user's model."""

import ast
import contextlib
import io
import itertools
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.errors import ExportError, require
from bitwright.exporting.deploy import CALLS, deploy, float_twin
from bitwright.files import atomic_write, check_output
from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.inputs import bind_inputs
from bitwright.graph.names import internal_names, namespace
from bitwright.preparation import ledger_of

OPSET = 21
_log = logging.getLogger(__name__)


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,  # noqa: ANN401
    *,
    dynamic_batch: bool = True,
    quantized: bool = True,
    overwrite: bool = True,
) -> Path:
    """Write a prepared and calibrated model as an ONNX file.

    Args:
        model: the model; it is left untouched.
        path: where to; the file appears whole or not at all.
        example_inputs: inputs to export with; those given to ``prepare`` by default.
        dynamic_batch: let the file take any batch size. Where the model fixes its batch size, that is logged.
        quantized: write integers; False writes the float model, for comparison.
        overwrite: whether an existing file may be replaced.

    Returns:
        The path of the file.
    """
    target = check_output(path, overwrite=overwrite)
    require("onnx", "onnx", "ONNX export")
    require("onnxscript", "onnx", "ONNX export")
    inputs = Inputs.of(example_inputs) if example_inputs is not None else ledger_of(model).example
    twin = deploy(model) if quantized else float_twin(model)
    program = _export_program(twin, inputs, dynamic_batch)
    _name_after_model(program.model, type(model).__name__, _sites(twin))
    if ledger_of(model).backend.activations.write_unsigned:
        _write_unsigned(program.model)
    _write(program.model, target)
    return target


def _export_program(twin: nn.Module, inputs: Inputs, dynamic_batch: bool) -> Any:  # noqa: ANN401
    from bitwright.exporting.translate import translations

    doubled, shapes = _dynamic(twin, inputs) if dynamic_batch else (inputs, None)
    options = {
        "dynamo": True,
        "opset_version": OPSET,
        "custom_translation_table": translations(),
        "verbose": False,
        "input_names": list(bind_inputs(twin, inputs.args, inputs.kwargs)),
    }
    reason = ""
    if shapes is not None:
        try:
            with _quiet(), torch.no_grad():
                program: Any = torch.onnx.export(
                    twin, doubled.args, kwargs=doubled.kwargs, dynamic_shapes=shapes, **options
                )
            if any(not isinstance(i.shape[0], int) for i in program.model.graph.inputs if i.shape):
                return program
            reason = "it was made for the example's batch size"
        except Exception as error:
            reason = _last_line(error)
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(twin, inputs.args, kwargs=inputs.kwargs, **options)
    except Exception as error:
        raise ExportError(f"the exporter refused the model: {_last_line(error)}") from error
    if reason:
        _log.warning("the file has a fixed batch size, as the model does not take others: %s", reason)
    return program


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's remarks are about itself; what concerns the user is raised or logged by us."""
    level = logging.root.manager.disable
    nowhere = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _name_after_model(model: Any, name: str, sites: dict[str, str]) -> None:  # noqa: ANN401
    """Name nodes and tensors after the user's modules, and leave out the exporter's private metadata."""
    graph = model.graph
    graph.name = name
    model.producer_name = "bitwright"
    model.producer_version = None
    taken: Counter[str] = Counter()
    keep = {id(v) for v in [*graph.inputs, *graph.outputs]}
    used = {v.name for v in [*graph.inputs, *graph.outputs, *graph.initializers.values()]}
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.metadata_props.clear()
        place = _place(scopes, sites) or node.op_type
        kind = {"QuantizeLinear": "/quantize", "DequantizeLinear": "/dequantize"}.get(node.op_type, "")
        taken[place + kind] += 1
        count = taken[place + kind]
        node.name = place + kind if count == 1 else f"{place}{kind}/{count}"
        for i, value in enumerate(node.outputs):
            value.metadata_props.clear()
            if id(value) not in keep:
                name = node.name.replace("/quantize", "/integers").replace("/dequantize", "")
                value.name = _unused(f"{name}.{i}" if i else name, used)
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        value.metadata_props.clear()
    model.metadata_props.clear()
    graph.metadata_props.clear()


def _unused(name: str, used: set[str]) -> str:
    """The name, or with a number where it is taken: a tensor and the module that quantizes it may share one."""
    free = next(n for n in (name if i == 1 else f"{name}:{i}" for i in itertools.count(1)) if n not in used)
    used.add(free)
    return free


def _sites(twin: nn.Module) -> dict[str, str]:
    """The paths of the modules that stand for single nodes, and what the user calls these nodes."""
    found: dict[str, str] = {}
    for path, region in twin.named_modules():
        if isinstance(region, CapturedModel):
            inside = f"{namespace(region)}.{CALLS}"
            names = internal_names(region, CALLS)
            found |= {f"{path}.{inside}.{name}".lstrip("."): f"{path}.{name}".lstrip(".") for name in names}
    return found


def _place(scopes: list[str], sites: dict[str, str]) -> str:
    """The node or module of the user's model that an operator came from, by the modules it was called in."""
    known = [sites[s] for s in scopes if s in sites]
    if known:
        return known[-1]
    return scopes[-2] if len(scopes) > 1 and scopes[-2] else (scopes[-1] if scopes else "")


def _write_unsigned(model: Any) -> None:  # noqa: ANN401
    """Write int8 activations as uint8: 128 more on every integer and zero point, so that the values are the same."""
    import numpy as np
    import onnx_ir as ir

    graph = model.graph
    for node in list(graph):
        point = node.inputs[2] if node.op_type == "QuantizeLinear" and len(node.inputs) > 2 else None
        if point is None or point.dtype != ir.DataType.INT8 or point.const_value is None or point.const_value.size != 1:
            continue
        name = f"{point.name}/unsigned"
        if name not in graph.initializers:
            shifted = ir.tensor((point.const_value.numpy().astype(np.int16) + 128).astype(np.uint8), name=name)
            kind = ir.TensorType(shifted.dtype)
            graph.register_initializer(ir.Value(name=name, const_value=shifted, shape=ir.Shape([]), type=kind))
        integers = node.outputs[0]
        integers.dtype = ir.DataType.UINT8
        for user in [node, *integers.consumers()]:
            user.replace_input_with(2, graph.initializers[name])


def _write(model: Any, target: Path) -> None:  # noqa: ANN401
    import onnx
    import onnx_ir as ir

    proto = ir.to_proto(model)
    with atomic_write(target) as partial:
        onnx.save_model(proto, str(partial))
        try:
            onnx.checker.check_model(str(partial), full_check=True)
        except onnx.checker.ValidationError as error:
            raise ExportError(f"the exported file is not valid ONNX: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
