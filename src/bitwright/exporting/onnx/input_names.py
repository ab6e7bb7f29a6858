"""Name a graph's inputs and outputs as the user wants."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from bitwright.errors import ConfigError


def name_inputs(graph: Any, names: Sequence[str] | None) -> None:  # noqa: ANN401
    """Rename the inputs of a graph, if names are given, one for each."""
    if names is None:
        return
    _check("input", names, graph.inputs)
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def name_outputs(graph: Any, names: Sequence[str] | None) -> Sequence[str] | None:  # noqa: ANN401
    """Rename the outputs of a graph, if names are given, one for each; each output then becomes a separate tensor."""
    if names is None:
        return None
    _check("output", names, graph.outputs)
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


def _check(kind: str, names: Sequence[str], ends: Sequence[Any]) -> None:
    if len(names) != len(ends):
        has = ", ".join(repr(e.name) for e in ends)
        count = f"{len(ends)} {kind}{'' if len(ends) == 1 else 's'}"
        raise ConfigError(f"{kind}_names has {len(names)} names, and the model has {count} ({has})")
