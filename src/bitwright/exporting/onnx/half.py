"""Store float constants in half precision where that loses nothing; runtimes cast them as they load the file."""

from typing import Any

import numpy as np
import onnx_ir as ir

_SMALL = 256  # values; for fewer, a cast takes as much space as it saves
_KINDS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_KEPT = ("QuantizeLinear", "DequantizeLinear")  # scales, which runtimes expect right at the operator


def store_half(graph: Any) -> None:
    """Store each large float32 constant in the first half type that holds it exactly, and cast it to float32."""
    for name, value in list(graph.initializers.items()):
        kind = _half_type(value)
        if kind is None:
            continue
        stored = ir.tensor(value.const_value.numpy().astype(kind.numpy()), dtype=kind, name=f"{name}.half")
        half = ir.Value(name=stored.name, const_value=stored, shape=value.shape, type=ir.TensorType(kind))
        graph.register_initializer(half)
        cast = ir.node("Cast", [half], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.cast")
        cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = f"{name}.float", value.shape, value.type
        graph.insert_before(graph[0], cast)
        for user, position in list(value.uses()):
            user.replace_input_with(position, cast.outputs[0])
        del graph.initializers[name]


def _half_type(value: Any) -> ir.DataType | None:
    """The type to store a constant in; None if it stays as it is."""
    tensor, readers = value.const_value, list(value.uses())
    if tensor is None or value.dtype != ir.DataType.FLOAT or tensor.size < _SMALL or value.is_graph_output():
        return None
    if not readers or any(user.op_type in _KEPT for user, _ in readers):
        return None
    return next((kind for kind in _KINDS if _holds(kind, tensor.numpy())), None)


def _holds(kind: ir.DataType, array: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        back = array.astype(kind.numpy()).astype(np.float32)
    return np.array_equal(back, array, equal_nan=True)
