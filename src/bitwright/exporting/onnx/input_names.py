"""Name a graph's inputs and outputs as the user wants."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from bitwright.exporting.formats.base import check_count


def name_inputs(graph: Any, names: Sequence[str] | None) -> None:
    """Rename the inputs of a graph, if names are given, one for each."""
    if names is None:
        return
    check_count("input", names, [value.name for value in graph.inputs])
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def name_outputs(graph: Any, names: Sequence[str] | None) -> Sequence[str] | None:
    """Rename the outputs of a graph, if names are given, one for each; each output then becomes a separate tensor."""
    if names is None:
        return None
    check_count("output", names, [value.name for value in graph.outputs])
    taken = {id(value) for value in graph.inputs}
    for place, name in enumerate(names):
        value = graph.outputs[place]
        if id(value) in taken:  # an input that is returned, or a tensor that is returned twice
            copy = ir.node("Identity", [value])
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            value = graph.outputs[place] = copy.outputs[0]
        value.name = name
        taken.add(id(value))
    return names
