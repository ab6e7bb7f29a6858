"""LSTMs with integer weights in ONNX: onnxruntime's own operator.

The file stores each weight in the model's layout, (4 · hidden, inputs) with the gates i, f, g, o. The operator's
layout, (directions, inputs, 4 · hidden) with the gates i, o, f, g, is computed from that; onnxruntime does so once, as
it loads the file.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch

import bitwright.exporting.recurrent  # noqa: F401  (defines the operator)
from bitwright.exporting.onnx.plain_lstm import DYNAMIC

_DOMAIN = "com.microsoft"


def _schema() -> onnx.defs.OpSchema:
    parameter, optional = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption.Optional
    names = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
    names += ("W_scale", "W_zero_point", "R_scale", "R_zero_point")
    kinds = {"W": "T2", "R": "T2", "W_zero_point": "T2", "R_zero_point": "T2", "sequence_lens": "T1"}
    free = {"B", "sequence_lens", "initial_h", "initial_c", "P"}
    inputs = [
        parameter(n, kinds.get(n, "T"), param_option=optional) if n in free else parameter(n, kinds.get(n, "T"))
        for n in names
    ]
    return onnx.defs.OpSchema(
        DYNAMIC,
        _DOMAIN,
        1,
        inputs=inputs,
        outputs=[parameter(n, "T") for n in ("Y", "Y_h", "Y_c")],
        type_constraints=[
            ("T", ["tensor(float)"], ""),
            ("T1", ["tensor(int32)"], ""),
            ("T2", ["tensor(int8)", "tensor(uint8)"], ""),
        ],
        attributes=[
            onnx.defs.OpSchema.Attribute("direction", onnx.defs.OpSchema.AttrType.STRING, ""),
            onnx.defs.OpSchema.Attribute("hidden_size", onnx.defs.OpSchema.AttrType.INT, ""),
        ],
    )


def recurrent_translations(op: Any) -> dict[Any, Any]:
    """A part of the table that ``torch.onnx.export`` takes."""
    write: Any = onnxscript.values.Op(onnxscript.values.Opset(_DOMAIN, 1), DYNAMIC, _schema())

    def dynamic_lstm(x: Any, h: Any, c: Any, weights: Sequence[Any], bias: Any, size: int) -> Any:
        order = op.Constant(value=ir.tensor(np.arange(4 * size).reshape(4, size)[[0, 3, 1, 2]].reshape(-1)))
        parts = [_arranged(op, [weight.producer() for weight in weights[kind::2]], order) for kind in range(2)]
        (w, w_scale, w_point), (r, r_scale, r_point) = parts
        direction = "bidirectional" if len(weights) > 2 else "forward"
        return write(
            *(x, w, r, bias, None, h, c, None, w_scale, w_point, r_scale, r_point),
            direction=direction,
            hidden_size=size,
        )

    return {torch.ops.bitwright.dynamic_lstm.default: dynamic_lstm}


def _arranged(op: Any, stored: list[Any], order: Any) -> tuple[Any, Any, Any]:
    """Integers, scales and zero points of the weights of all directions, from the nodes that dequantize them."""
    first = op.Constant(value=ir.tensor(np.array([0])))
    made: tuple[list[Any], ...] = ([], [], [])
    for node in stored:
        integers, *rest = node.inputs
        rows = op.Gather(integers, order, axis=0)
        rows.producer().metadata_props.update(node.metadata_props)  # it reads the integers now
        made[0].append(op.Unsqueeze(op.Transpose(rows, perm=[1, 0]), first))
        for values, given in zip(made[1:], rest, strict=True):
            values.append(op.Unsqueeze(op.Gather(given, order, axis=0) if _per_row(node) else given, first))
    whole = [op.Concat(*values, axis=0) if len(values) > 1 else values[0] for values in made]
    return whole[0], whole[1], whole[2]


def _per_row(node: Any) -> bool:
    return "axis" in node.attributes
