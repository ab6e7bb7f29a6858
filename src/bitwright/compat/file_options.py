"""Options of old exporters for a file: axes that may vary, and bits noted on its nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.graph.inputs import flat_inputs
from bitwright.spec import QuantSpec


def shapes_of(model: nn.Module, inputs: Any, axes: Any, names: Sequence[str] | None) -> Any:
    """``dynamic_axes`` as ``dynamic_shapes``: by the names of inputs in the file, a list of axes or their names.

    Axes of outputs follow from these. A value that names no input, such as True, leaves free what the model allows.
    """
    if not axes:
        return False
    arguments = list(flat_inputs(model, inputs))
    known = dict(zip(names or arguments, arguments, strict=False))
    given = {known[name]: of for name, of in axes.items() if name in known} if isinstance(axes, Mapping) else {}
    auto = torch.export.Dim.AUTO
    return {
        argument: dict(of) if isinstance(of, Mapping) else dict.fromkeys(of, auto) for argument, of in given.items()
    } or True


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
