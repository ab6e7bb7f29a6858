"""Transposed convolutions, which inductor (torch 2.13) takes for convolutions where their weight is dequantized.

It then computes other values, or fails. Written as arithmetic, the same dequantization makes it compute them in float.
"""

from typing import Any

import torch
from torch import fx

from bitwright.graph.facts import note_as_torch, noted_by_torch

_TRANSPOSED = {
    torch.ops.aten.conv_transpose1d.default,
    torch.ops.aten.conv_transpose2d.input,
    torch.ops.aten.conv_transpose3d.input,
}
_QUANTIZED = "dequantize_per_"


def keep_transposed_float(program: Any) -> None:
    """Dequantize the weights of a program's transposed convolutions by arithmetic."""
    graph, changed = program.graph, False
    for node in [n for n in graph.nodes if n.target in _TRANSPOSED]:
        weight = node.args[1]
        if str(getattr(weight.target, "__name__", "")).startswith(_QUANTIZED):
            with graph.inserting_before(node):
                node.replace_input_with(weight, _dequantized(weight))
            changed = True
    if changed:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _dequantized(weight: fx.Node) -> fx.Node:
    """What torch's dequantizer computes: (integers - zero point) * scale."""
    aten: Any = torch.ops.aten
    integers: Any
    integers, scale, point, *rest = weight.args
    per_channel = "per_channel" in str(weight.target)
    if per_channel:
        shape = [1] * noted_by_torch(weight, "val").ndim
        shape[int(rest[0])] = -1  # pyrefly: ignore
        scale, point = (_call(weight, aten.view.default, numbers, shape) for numbers in (scale, point))
    values = _call(weight, aten.to.dtype, integers, torch.float32)
    moved = _call(weight, aten.sub.Tensor, values, point)
    return _call(weight, aten.mul.Tensor, moved, scale)


def _call(like: fx.Node, operator: Any, *args: Any) -> fx.Node:
    """A call with the same origin as a node's."""
    made = like.graph.call_function(operator, args)
    values = [noted_by_torch(a, "val") if isinstance(a, fx.Node) else a for a in args]
    note_as_torch(made, like, operator(*values))
    return made
