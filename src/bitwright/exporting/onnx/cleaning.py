"""Clean an exported graph: express the same values in a way that runtimes do not get wrong."""

from typing import Any

import numpy as np
import onnx_ir as ir

_CONVOLUTIONS = {"Conv", "ConvTranspose"}
_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Identity"}
_LAYERS = _CONVOLUTIONS | {"MatMul", "Gemm"}


def transpose_for_each_reader(model: Any) -> None:
    """Give each product its own transposed weight: onnxruntime computes in float where several share one."""
    for node in [n for n in model.graph if n.op_type == "Transpose"]:
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        if source is None or source.op_type != "DequantizeLinear":
            continue
        for user, position in list(node.outputs[0].uses())[1:]:
            own = ir.node("Transpose", [node.inputs[0]], node.attributes, metadata_props=dict(user.metadata_props))
            own.outputs[0].shape, own.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            model.graph.insert_before(user, own)
            user.replace_input_with(position, own.outputs[0])


def scale_results(model: Any) -> None:
    """Make a positive factor between an integer operator and a quantizer part of its scale:  Q(x·c; s)  ->  Q(x; s/c).

    The integers are the same, except for rounding. Their readers still dequantize with s. A factor after a float
    operator stays: it may belong to something that runtimes know as a whole, such as GELU.
    """
    for node in [n for n in model.graph if n.op_type in ("Mul", "Div")]:
        uses = list(node.outputs[0].uses())
        factor = _number(node.inputs[1])
        if len(uses) != 1 or node.outputs[0].is_graph_output() or factor is None or not factor > 0:
            continue
        if not _computes_on_integers(node.inputs[0]):
            continue
        quantizer, position = uses[0]
        scale = quantizer.inputs[1] if quantizer.op_type == "QuantizeLinear" and position == 0 else None
        if scale is None or scale.const_value is None:
            continue
        found = scale.const_value.numpy()
        scaled = (found * factor if node.op_type == "Div" else found / factor).astype(found.dtype)
        name = f"{scale.name}/{node.outputs[0].name}"
        made = ir.Value(name=name, const_value=ir.tensor(scaled, name=name), shape=scale.shape, type=scale.type)
        model.graph.register_initializer(made)
        quantizer.replace_input_with(0, node.inputs[0])
        quantizer.replace_input_with(1, made)
        model.graph.remove(node, safe=True)


def _computes_on_integers(value: Any) -> bool:
    """Whether a value is computed from dequantized tensors, and perhaps limited."""
    while (node := value.producer()) is not None and node.op_type in ("Relu", "Clip"):
        value = node.inputs[0]
    makers = [] if node is None else [given.producer() for given in node.inputs if given is not None]
    return bool(makers) and all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)


def join_gelu(model: Any) -> None:
    """Make a GELU of a quantized tensor read it from one operator.

    onnxruntime dequantizes a tensor once for each reader, and no longer sees that the two parts of x · (1 + erf(x/√2))
    read the same.
    """
    for node in [n for n in model.graph if n.op_type == "Erf"]:
        quotient = node.inputs[0].producer()
        x = quotient.inputs[0] if quotient is not None and quotient.op_type == "Div" else None
        if x is None or x.producer() is None or x.producer().op_type != "DequantizeLinear":
            continue
        uses = list(x.uses())
        same = _same(model, x, quotient)
        for user, position in uses:
            if user is quotient or (user.op_type == "Mul" and _reads_one_plus_erf(user, node)):
                user.replace_input_with(position, same)


def keep_results(model: Any) -> None:
    """Keep results of the graph from being quantized because something reads them, moves them and quantizes that.

    onnxruntime (1.31) quantizes such a tensor before it is moved, and then returns the rounded one.
    """
    for result in list(model.graph.outputs):
        for user, position in list(result.uses()):
            if _moves_to_quantizer(user):
                user.replace_input_with(position, _same(model, result, user))


def keep_padding(model: Any) -> None:
    """Keep padding with zeros apart from a pool of largest values.

    onnxruntime (1.31) makes both one, and then pads with the lowest number instead, also where all values are negative.
    """
    for node in [n for n in model.graph if n.op_type == "Pad" and _pads_with_zero(n)]:
        padded = node.outputs[0]
        for user, position in list(padded.uses()):
            if user.op_type == "MaxPool":
                user.replace_input_with(position, _same(model, padded, user))


def _pads_with_zero(node: Any) -> bool:
    mode, value = node.attributes.get("mode"), node.inputs[2] if len(node.inputs) > 2 else None
    return (mode is None or mode.as_string() == "constant") and (value is None or not _number(value))


def _moves_to_quantizer(node: Any) -> bool:
    if node.op_type not in _MOVES:
        return False
    readers = [user for user, _ in node.outputs[0].uses()]
    return any(user.op_type == "QuantizeLinear" or _moves_to_quantizer(user) for user in readers)


def _same(model: Any, x: Any, reader: Any) -> Any:
    """The values of a tensor from an operator of their own, before a reader: runtimes do not look past it."""
    lowest = ir.node("Constant", [], {"value": ir.tensor(np.finfo(np.float32).min)})
    same = ir.node("Max", [x, lowest.outputs[0]], metadata_props=dict(reader.metadata_props))
    same.outputs[0].shape, same.outputs[0].type = x.shape, x.type
    model.graph.insert_before(reader, [lowest, same])
    return same.outputs[0]


def _reads_one_plus_erf(product: Any, erf: Any) -> bool:
    sums = [value.producer() for value in product.inputs]
    return any(s is not None and s.op_type == "Add" and erf.outputs[0] in s.inputs for s in sums)


def _number(value: Any) -> float | None:
    """The value of a constant that has only one."""
    constant = None if value is None else value.const_value
    return float(constant.numpy().reshape(-1)[0]) if constant is not None and constant.size == 1 else None


def add_biases(model: Any) -> None:
    """In a graph that computes sizes, add the biases of convolutions after them.

    OpenVINO (2026.4) asks each convolution with a bias for its rank, and then takes sizes from there that others have,
    too, from before the bias is added; where a convolution has such a second reader, it loses the bias.
    """
    if not any(node.op_type == "Shape" for node in model.graph):
        return
    for node in [n for n in model.graph if n.op_type in _CONVOLUTIONS and len(n.inputs) > 2]:
        bias, result = node.inputs[2], node.outputs[0]
        places = ir.tensor(list(range(1, len(result.shape) - 1)))  # (channels, 1, 1)
        axes = ir.node("Constant", [], {"value": places}, metadata_props=dict(node.metadata_props))
        spread = ir.node("Unsqueeze", [bias, axes.outputs[0]], metadata_props=dict(node.metadata_props))
        total = ir.node("Add", [result, spread.outputs[0]], metadata_props=dict(node.metadata_props))
        total.outputs[0].shape, total.outputs[0].type = result.shape, result.type
        node.resize_inputs(2)
        ir.convenience.replace_all_uses_with(result, total.outputs[0], replace_graph_outputs=True)
        total.replace_input_with(0, result)
        model.graph.insert_after(node, [axes, spread, total])


def state_sizes(model: Any) -> None:
    """After a reshape to computed sizes, state those that are known, in a second reshape.

    OpenVINO (2026.4) knows none of the sizes if it cannot follow how one of them is computed. Where it does not know
    the number of channels, it quantizes with other channels' ranges.
    """
    for node in [n for n in model.graph if n.op_type == "Reshape" and not _is_stored(n.inputs[1])]:
        result = node.outputs[0]
        known = [] if result.shape is None else [size if isinstance(size, int) else 0 for size in result.shape]
        if not any(known):
            continue
        sizes = ir.node("Constant", [], {"value": ir.tensor(known)}, metadata_props=dict(node.metadata_props))
        same = ir.node("Reshape", [result, sizes.outputs[0]], metadata_props=dict(node.metadata_props))  # 0: unchanged
        same.outputs[0].shape, same.outputs[0].type = result.shape, result.type
        ir.convenience.replace_all_uses_with(result, same.outputs[0], replace_graph_outputs=True)
        same.replace_input_with(0, result)
        model.graph.insert_after(node, [sizes, same])


def _is_stored(value: Any) -> bool:
    maker = value.producer()
    return value.const_value is not None or (maker is not None and maker.op_type == "Constant")


def separate_weights(model: Any) -> None:
    """Store another copy of the weight for a layer that shares weight and input with another.

    OpenVINO (2026.4) merges the two layers, and applies the scale twice.
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


def _way_from_weight(value: Any) -> list[Any]:
    """What makes a layer's weight of stored integers: they are dequantized, and perhaps transposed; else nothing."""
    way: list[Any] = []
    while (node := value.producer()) is not None and node.op_type in ("Transpose", "DequantizeLinear"):
        way.insert(0, node)
        value = node.inputs[0]
    return way if value.const_value is not None and way and way[0].op_type == "DequantizeLinear" else []
