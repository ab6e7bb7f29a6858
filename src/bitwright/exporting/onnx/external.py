"""External data: store the large tensors of an ONNX model in a second file, since one file holds at most 2 GB."""

import hashlib
import io
from typing import IO, Any

import onnx

LIMIT = 2**31 - 2**24  # protobuf's limit, less some room for the graph
_LARGE = 1024  # bytes; smaller tensors are not worth moving
_ALIGNMENT = 4096  # so that runtimes can map the file into memory


def stored_bytes(model: onnx.ModelProto) -> int:
    """How many bytes the tensors of a model take."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def move_out(model: onnx.ModelProto, file: IO[bytes], location: str) -> str:
    """Write the large tensors of a model into a file, leave references to ``location``, and return the checksum."""
    digest, end = hashlib.sha256(), 0
    for tensor in model.graph.initializer:
        data = tensor.raw_data
        if len(data) < _LARGE:
            continue
        gap = bytes(-end % _ALIGNMENT)
        for part in (gap, data):
            file.write(part)
            digest.update(part)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", end + len(gap)), ("length", len(data))):
            tensor.external_data.add(key=key, value=str(value))
        end += len(gap) + len(data)
    return digest.hexdigest()


def outline(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model whose large tensors are inputs without values, enough to infer shapes."""
    copy = onnx.ModelProto()
    _copy_fields(model, copy, "graph")
    _copy_fields(model.graph, copy.graph, "initializer")
    given = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) < _LARGE:
            copy.graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in given:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy


def _copy_fields(source: Any, target: Any, without: str) -> None:
    for field, value in source.ListFields():
        if field.name == without:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def shipped(model: onnx.ModelProto) -> dict[str, bytes]:
    """A model as the bytes of one file, or of two if one cannot hold it, by name."""
    if stored_bytes(model) <= LIMIT:
        return {"model.onnx": model.SerializeToString()}
    copy, data = onnx.ModelProto(), io.BytesIO()
    copy.CopyFrom(model)
    move_out(copy, data, "model.onnx.data")
    return {"model.onnx": copy.SerializeToString(), "model.onnx.data": data.getvalue()}
