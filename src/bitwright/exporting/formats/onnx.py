"""ONNX with QuantizeLinear and DequantizeLinear: through ``torch.onnx.export``, then named after the user's model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from bitwright.errors import ExportError, VerifyError, suggest, useful_line
from bitwright.exporting.deploy import Deployment
from bitwright.exporting.fingerprint import fingerprint
from bitwright.exporting.formats.base import FORMATS, ExportFormat, ExportOptions, LoadedFile, register_format
from bitwright.exporting.making import Making
from bitwright.exporting.parts import parts_of
from bitwright.exporting.record import ExportRecord
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs


@register_format("onnx")
class OnnxFormat(ExportFormat):
    """A valid ONNX file of the lowest opset that can say it; its metadata holds the record, its end a checksum."""

    name = "onnx"
    suffix = ".onnx"
    packages: ClassVar[dict[str, str]] = {"onnx": "onnx", "onnxscript": "onnx"}

    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        from bitwright.exporting.onnx.seal import write_recorded

        proto, record = build(deployment, inputs, options, self.name)
        return write_recorded(proto, record, target, options.external_data)

    def read(self, path: Path) -> LoadedFile:
        """Read the file; one of another format that is ONNX, too, as that format does."""
        from bitwright.exporting.onnx.file import OnnxFile

        file = OnnxFile.read(path)
        written = file.record.format if file.record is not None else self.name
        if written == self.name:
            return file
        if written not in FORMATS:
            raise VerifyError(f"{str(path)!r} is of the format {written!r}{suggest(written, FORMATS)}")
        return FORMATS.get(written)().restore(file)


def build(deployment: Deployment, inputs: Inputs, options: ExportOptions, format: str) -> tuple[Any, ExportRecord]:
    """The ONNX model of a deployed one, checked, and its record, which is not in it yet."""
    import onnx_ir as ir

    from bitwright.exporting.onnx.cleaning import (
        add_biases,
        join_gelu,
        keep_padding,
        keep_results,
        scale_results,
        separate_weights,
        state_sizes,
        transpose_for_each_reader,
    )
    from bitwright.exporting.onnx.half import store_half
    from bitwright.exporting.onnx.input_names import name_inputs, name_outputs
    from bitwright.exporting.onnx.names import name_after_model
    from bitwright.exporting.onnx.opset import RICH, opset_for
    from bitwright.exporting.onnx.program import export_program
    from bitwright.exporting.onnx.quiet import quiet_exporter
    from bitwright.exporting.onnx.scales import drop_repeated, offset_norms
    from bitwright.exporting.onnx.witness import optimize

    twin, origins = deployment.model, deployment.origins
    digest = fingerprint(twin)  # before the exporter runs it: a counter may go on
    opset = opset_for(twin, options.opset_version, pack=options.pack_weights)
    model = export_program(twin, inputs, opset, options.dynamic_shapes, pack=options.pack_weights)
    with quiet_exporter():
        witnesses = optimize(model, [part for _, part in parts_of(twin)])
    if any(_is_text(value) for node in model.graph for value in (*node.inputs, *node.outputs)):  # see adaptive.py
        raise ExportError("ONNX cannot express the indices of an adaptive pool: leave out return_indices=True")
    transpose_for_each_reader(model)
    if deployment.rules.scaled_results:
        scale_results(model)
    if deployment.rules.dequantizes_apart:
        join_gelu(model)
        keep_results(model)
    if deployment.rules.dequantizes_apart or not deployment.quantized:
        keep_padding(model)
    if deployment.rules.float_apart:
        add_biases(model)
        separate_weights(model)
        state_sizes(model)
    if deployment.rules.moves_scales:
        drop_repeated(model, witnesses)
        offset_norms(model)
    name = twin.__class__.__name__
    arguments = _arguments(model.graph, list(flat_inputs(twin, inputs)))
    name_inputs(model.graph, options.input_names)
    results = deployment.results() if name_outputs(model.graph, options.output_names) is None else []
    operators = name_after_model(model, options.model_name or name, origins, results)
    if not deployment.clean and (options.unsigned_activations or opset >= RICH):  # see lowest_opset
        write_unsigned(model)
    if options.store_half:
        store_half(model.graph)
    record = ExportRecord(
        format=format,
        model=name,
        quantized=deployment.quantized,
        fingerprint=digest,
        inputs=arguments,
        tensors=tuple(w.entry() for w in witnesses),
        operators=tuple(operators),
        making=asdict(Making.of(twin, inputs, options, FORMATS.get(format).packages)),
    )
    proto = ir.to_proto(model)
    check_valid(proto, "the exported file")
    return proto, record


def check_valid(model: Any, what: str) -> None:
    """Refuse a model that is not valid ONNX."""
    import onnx

    from bitwright.exporting.onnx.external import outline

    try:
        onnx.checker.check_model(outline(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"{what} is not valid ONNX: {useful_line(error)}") from error


def _is_text(value: Any) -> bool:
    return value is not None and value.const_value is not None and value.const_value.dtype.name == "STRING"


def _arguments(graph: Any, names: list[str]) -> tuple[str, ...]:
    """The arguments that a graph's inputs are; one that is also an output is called otherwise in the graph."""
    given = [value.name for value in graph.inputs]
    return tuple(names if len(names) == len(given) else given)


def write_unsigned(model: Any) -> None:
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
