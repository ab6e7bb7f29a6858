"""Write a graph for a runtime that itself passes on the scales of quantized tensors, as OpenVINO does.

Such a runtime needs no quantizer after what only moves values, and rounds once more if it finds one. It makes a norm
part of the quantizer after it, but then converts what it reads to float to subtract a zero point.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from bitwright.exporting.onnx.witness import Witness
from bitwright.exporting.record import REPEATED

# OpenVINO (2026.4) passes scales on through these, but not through Tile. It makes padding part of the convolution that
# reads it, which it computes wrongly for some sizes, unless a quantizer is between. What is joined has a zero point for
# each channel there, which it passes on through fewer.
_KEEP_CHANNELS = {"Concat", "MaxPool", "Resize"}
_MOVES = _KEEP_CHANNELS | {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Split", "Slice", "Gather", "Expand"),
    *("DepthToSpace", "SpaceToDepth"),
}

Grid = tuple[Any, float, int]  # the type of the integers, the scale and the zero point


def drop_repeated(model: Any, witnesses: list[Witness]) -> None:
    """Remove quantizers of values that others have rounded to the same grid."""
    dropped = set()
    for node in [n for n in model.graph if n.op_type == "QuantizeLinear"]:
        grid, source = _grid(node), _uncut(node.inputs[0])
        readers = [user for user, _ in node.outputs[0].uses()]
        if grid is None or source.producer() is None or _grid_behind(source) != grid:
            continue
        if all(_grid(reader) == grid and _can_go(reader.outputs[0], source) for reader in readers):
            _drop(model, node, source, readers)
            dropped.add(id(node.outputs[0]))
    for witness in witnesses:
        if id(witness.value) in dropped and not witness.value.is_graph_output():
            witness.value, witness.reason = None, REPEATED


def _drop(model: Any, node: Any, source: Any, readers: list[Any]) -> None:
    """Make those that read a quantizer's dequantized integers read what it quantizes."""
    for reader in readers:
        reader.outputs[0].replace_all_uses_with(source)
        model.graph.remove(reader, safe=True)
    if not node.outputs[0].is_graph_output():
        model.graph.remove(node, safe=True)


def offset_norms(model: Any) -> None:
    """Make zero points part of the norms that read them:  a·s·(q - z) + b  =  a·s·q + (b - a·s·z)."""
    made: dict[int, Any] = {}
    for node in [n for n in model.graph if n.op_type == "BatchNormalization"]:
        grid = _grid_behind(node.inputs[0])
        if grid is not None and grid[2] and _moved_for_norms(node.inputs[0]):
            node.replace_input_with(0, _from_zero(model, node.inputs[0], made))
            _lower(model, node, grid[1] * grid[2])
    passes.RemoveUnusedNodesPass()(model)


def _grid(node: Any) -> Grid | None:
    """The grid that a quantizer rounds to, or from which a tensor is dequantized, if it is one for the whole tensor."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.inputs) < 3:
        return None
    scale, point = (None if given is None else given.const_value for given in node.inputs[1:3])
    if scale is None or point is None or scale.size != 1 or point.size != 1:
        return None
    return (point.dtype, float(scale.numpy().reshape(-1)[0]), int(point.numpy().reshape(-1)[0]))


def _uncut(value: Any) -> Any:
    """What a Clip reads, if that was cut to the same limits before it was rounded, as to those of a narrow range."""
    limits = _limits(value.producer())
    source = value.producer().inputs[0] if limits else None
    return source if source is not None and _limits_behind(source) == limits else value


def _limits(node: Any) -> tuple[float, ...]:
    """The constant limits of a Clip; none for another operator."""
    ends = [] if node is None or node.op_type != "Clip" else [end and end.const_value for end in node.inputs[1:3]]
    known = len(ends) == 2 and all(end is not None and end.size == 1 for end in ends)
    return tuple(float(end.numpy().reshape(-1)[0]) for end in ends) if known else ()


def _limits_behind(value: Any) -> tuple[float, ...]:
    """The limits to which a dequantized value, perhaps moved, was cut before it was quantized."""
    node = value.producer()
    if node is None or node.op_type not in _MOVES | {"QuantizeLinear", "DequantizeLinear"}:
        return _limits(node)
    found = {_limits_behind(each) for each in _moved_by(node)}
    return found.pop() if len(found) == 1 else ()


def _grid_behind(value: Any) -> Grid | None:
    """The grid of a value that is dequantized, and perhaps moved or joined with others on the same grid."""
    node = value.producer()
    if node is None or node.op_type == "DequantizeLinear":
        return None if node is None else _grid(node)
    if node.op_type not in _MOVES or (node.op_type not in _KEEP_CHANNELS and _is_joined(node.inputs[0])):
        return None
    grids = {_grid_behind(each) for each in _moved_by(node)}
    return grids.pop() if len(grids) == 1 else None


def _moved_by(node: Any) -> list[Any]:
    """The tensors that an operator moves; its other inputs are sizes and places."""
    return list(node.inputs if node.op_type == "Concat" else node.inputs[:1])


def _is_joined(value: Any) -> bool:
    """Whether a tensor was joined; OpenVINO moves quantizers from after that to before it."""
    node = value.producer()
    if node is None or node.op_type not in _MOVES | {"QuantizeLinear", "DequantizeLinear"}:
        return False
    return node.op_type == "Concat" or _is_joined(node.inputs[0])


def _can_go(result: Any, source: Any) -> bool:
    """Whether readers of a dequantized tensor may read it before it is quantized."""
    moves = {user.op_type for user, _ in result.uses()} & _MOVES
    return not result.is_graph_output() and (moves <= _KEEP_CHANNELS or not _is_joined(source))


def _moved_for_norms(value: Any) -> bool:
    """Whether a tensor, and what it is moved from, is read by norms alone, and can lose its zero point there."""
    node = value.producer()
    if node.op_type == "DequantizeLinear":
        return True
    return _only_norms_read(value) and all(map(_moved_for_norms, _moved_by(node)))


def _only_norms_read(value: Any) -> bool:
    readers = [reader for reader, _ in value.uses()]
    moved = [each for each in readers if each.op_type in _MOVES]
    norms = all(each.op_type == "BatchNormalization" for each in readers if each not in moved)
    norms = norms and all(_only_norms_read(result) for each in moved for result in each.outputs)
    return norms and not value.is_graph_output()


def _from_zero(model: Any, value: Any, made: dict[int, Any]) -> Any:
    """A tensor that is dequantized, and perhaps moved, without its zero point."""
    if id(value) in made:
        return made[id(value)]
    node = value.producer()
    given = list(node.inputs[:2])
    if node.op_type != "DequantizeLinear":
        moved = _moved_by(node)
        given = [*(_from_zero(model, each, made) for each in moved), *node.inputs[len(moved) :]]
    settings = {"attributes": node.attributes, "num_outputs": len(node.outputs), "name": node.name}
    own = ir.node(node.op_type, given, metadata_props=dict(node.metadata_props), **settings)
    for old, new in zip(node.outputs, own.outputs, strict=True):
        new.shape, new.type = old.shape, old.type
        made[id(old)] = new
    model.graph.insert_after(node, own)
    return made[id(value)]


def _lower(model: Any, norm: Any, offset: float) -> None:
    """Subtract from a norm's bias what an offset of its input adds to its result."""
    factor, bias, _, variance = (given.const_value.numpy().astype(np.float64) for given in norm.inputs[1:5])
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    lowered = (bias - factor / np.sqrt(variance + epsilon) * offset).astype(np.float32)
    name = f"{norm.outputs[0].name}/offset"
    made = ir.Value(
        name=name, const_value=ir.tensor(lowered, name=name), shape=norm.inputs[2].shape, type=norm.inputs[2].type
    )
    model.graph.register_initializer(made)
    norm.replace_input_with(2, made)
