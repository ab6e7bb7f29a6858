"""Change an ONNX file that is written: the names of its inputs and outputs, and what is noted on its nodes."""

from pathlib import Path
from typing import Any

from bitwright.errors import ConfigError
from bitwright.spec import QuantSpec


def rename_ends(path: Path, input_names: list[str] | None, output_names: list[str] | None) -> None:
    """Rename the inputs and outputs of a file, if asked to; the file is replaced whole or not at all."""
    if not input_names and not output_names:
        return
    import onnx

    from bitwright.exporting.onnx.seal import write_sealed

    model = onnx.load(str(path))
    graph = model.graph
    names: dict[str, str] = {}
    for kind, ends, wished in (("input", graph.input, input_names), ("output", graph.output, output_names)):
        if wished is None:
            continue
        if len(wished) != len(ends):
            raise ConfigError(f"{kind}_names has {len(wished)} names, the model {len(ends)} {kind}s: {list(wished)}")
        names |= {end.name: wish for end, wish in zip(ends, wished, strict=True)}
    for end in (*graph.input, *graph.output):
        end.name = names.get(end.name, end.name)
    for node in graph.node:
        for field in (node.input, node.output):
            _rename(field, names)
    write_sealed(model, path)


def _rename(field: Any, names: dict[str, str]) -> None:
    for place, name in enumerate(field):
        field[place] = names.get(name, name)


def add_bits(source: Path, target: Path, record: Any) -> None:
    """Copy a file; each node that quantizes a tensor or goes back has its ``bits`` in the copy's metadata."""
    import onnx

    from bitwright.exporting.onnx.seal import write_sealed

    model = onnx.load(str(source))
    bits = {tensor.tensor: QuantSpec.parse(tensor.spec).bits for tensor in record.tensors}
    for node in model.graph.node:
        known = next((bits[name] for name in (*node.output, *node.input) if name in bits), None)
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and known is not None:
            node.metadata_props.add(key="bits", value=str(known))
    write_sealed(model, target)
