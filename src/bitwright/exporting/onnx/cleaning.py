"""Cleaning of an exported graph: the same values, said so that runtimes do not get them wrong."""

from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

_LAYERS = {"Conv", "ConvTranspose", "MatMul", "Gemm"}


def transpose_for_each_reader(model: Any) -> None:  # noqa: ANN401
    """Let each product have its own transposed weight: onnxruntime computes in float where several read one."""
    for node in [n for n in model.graph if n.op_type == "Transpose"]:
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        if source is None or source.op_type != "DequantizeLinear":
            continue
        for user, position in list(node.outputs[0].uses())[1:]:
            own = ir.node("Transpose", [node.inputs[0]], node.attributes, metadata_props=dict(user.metadata_props))
            own.outputs[0].shape, own.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            model.graph.insert_before(user, own)
            user.replace_input_with(position, own.outputs[0])


def keep_first_size(model: Any) -> None:  # noqa: ANN401
    """Say "as it is" (0) where a reshape keeps a free first size, in place of the size that the exporter computes.

    With more free sizes, OpenVINO (2026.4) loses the biases of convolutions elsewhere in such a file.
    """
    for node in [n for n in model.graph if n.op_type == "Reshape" and _keeps_first_size(n)]:
        sizes = node.inputs[1].producer()
        notes = dict(node.metadata_props)
        zero = ir.node("Constant", [], {"value_ints": [0]}, metadata_props=notes)
        own = ir.node("Concat", [zero.outputs[0], *sizes.inputs[1:]], {"axis": 0}, metadata_props=notes)
        for made in (zero, own):
            made.outputs[0].dtype = ir.DataType.INT64
            model.graph.insert_before(node, made)
        node.replace_input_with(1, own.outputs[0])
        node.attributes.pop("allowzero", None)
    passes.RemoveUnusedNodesPass()(model)


def _keeps_first_size(node: Any) -> bool:  # noqa: ANN401
    before, after = (value.shape or (None,) for value in (node.inputs[0], node.outputs[0]))
    sizes = node.inputs[1].producer()
    if before[0] != after[0] or not isinstance(after[0], ir.SymbolicDim):
        return False
    if sizes is None or sizes.op_type != "Concat" or len(sizes.inputs) != len(after):  # one input for each size
        return False
    known = [value.const_value.numpy() for value in sizes.inputs if value.const_value is not None]
    return all(size.all() for size in known)  # a size of 0 would be taken for "as it is", too


def separate_weights(model: Any) -> None:  # noqa: ANN401
    """Store one more weight for a layer that has the weight and the input of another.

    OpenVINO (2026.4) makes one layer of both, and applies its scale twice.
    """
    seen: set[tuple[int, int]] = set()
    for node in [n for n in model.graph if n.op_type in _LAYERS]:
        way = _way_from_weight(node.inputs[1])
        if not way:
            continue
        integers = way[0].inputs[0]
        if (id(node.inputs[0]), id(integers)) not in seen:
            seen.add((id(node.inputs[0]), id(integers)))
            continue
        value = ir.Value(
            name=f"{integers.name}/{len(model.graph.initializers)}",
            const_value=ir.tensor(integers.const_value.numpy(), dtype=integers.dtype),
            shape=integers.shape,
            type=integers.type,
        )
        model.graph.register_initializer(value)
        for step in way:
            own = ir.node(
                step.op_type, [value, *step.inputs[1:]], step.attributes, metadata_props=dict(step.metadata_props)
            )
            value = own.outputs[0]
            value.shape, value.type = step.outputs[0].shape, step.outputs[0].type
            model.graph.insert_before(node, own)
        node.replace_input_with(1, value)


def _way_from_weight(value: Any) -> list[Any]:  # noqa: ANN401
    """What makes a layer's weight of stored integers: they are dequantized, and perhaps transposed; else nothing."""
    way: list[Any] = []
    while (node := value.producer()) is not None and node.op_type in ("Transpose", "DequantizeLinear"):
        way.insert(0, node)
        value = node.inputs[0]
    return way if value.const_value is not None and way and way[0].op_type == "DequantizeLinear" else []
