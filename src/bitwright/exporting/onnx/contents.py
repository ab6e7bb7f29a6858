"""The contents of an ONNX model: operators and stored tensors one by one, and all else that it says."""

from typing import Any

import onnx

from bitwright.exporting.contents import Contents
from bitwright.exporting.onnx.seal import DATA, KEY, RECORD

_APART = {KEY, DATA, RECORD}  # checksums of what is compared itself, and the record, which is compared as such


def add_contents(model: onnx.ModelProto, found: Contents) -> None:
    """Add the contents of a model whose tensors are loaded."""
    for node in model.graph.node:
        found.add(f"the operator {node.name or node.op_type}", _bytes(node))
    for tensor in model.graph.initializer:
        found.add(f"the stored tensor {tensor.name}", _bytes(tensor))
    _add_fields(model.graph, {"node", "initializer"}, found)
    _add_fields(model, {"graph", "metadata_props"}, found)
    for entry in model.metadata_props:
        if entry.key not in _APART:
            found.add(f"the metadata {entry.key}", entry.value)


def _add_fields(message: Any, without: set[str], found: Contents) -> None:
    for field, value in message.ListFields():
        for item in (value if field.is_repeated else [value]) if field.name not in without else ():
            name = getattr(item, "name", "") or getattr(item, "domain", "")
            found.add(f"the {field.name} {name}".rstrip(), _bytes(item) if field.message_type else repr(item))


def _bytes(message: Any) -> bytes:
    return message.SerializeToString(deterministic=True)
