"""Name nodes and tensors of an ONNX graph after the user's modules; names are for people, and the record is exact."""

import ast
import itertools
import re
from typing import Any

from bitwright.exporting.deploy import Origin
from bitwright.exporting.record import ExportedOperator

_SCOPES = "pkg.torch.onnx.name_scopes"  # the modules that a node was called in, the outermost first, and its fx name
_KINDS = {"QuantizeLinear": ("/quantize", "/integers"), "DequantizeLinear": ("/dequantize", "")}


def name_after_model(model: Any, name: str, calls: dict[str, Origin], results: list[str]) -> list[ExportedOperator]:
    """Name a graph's nodes and tensors, drop the exporter's private metadata, and return what each node came from."""
    graph = model.graph
    graph.name, model.producer_name, model.producer_version = name, "bitwright", None
    _name_outputs(graph, results)
    ends = {id(v) for v in [*graph.inputs, *graph.outputs]}
    used_nodes: set[str] = set()
    used = {v.name for v in [*graph.inputs, *graph.outputs]}
    for value in list(graph.initializers.values()):
        key, origin = _deepest(_prefixes(value.name), calls)
        value.name = _unused(origin.name + value.name[len(key) :], used)
        value.metadata_props.clear()
    operators = []
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        node.metadata_props.clear()
        key, origin = _deepest(scopes[-2::-1], calls)
        place = origin.name + scopes[-2][len(key) :] if len(scopes) > 1 else ""
        place = place or (scopes[-1] if scopes else node.op_type)
        as_node, as_value = _KINDS.get(node.op_type, ("", ""))
        node.name = _unused(place + as_node, used_nodes)
        for i, value in enumerate(node.outputs):
            value.metadata_props.clear()
            if id(value) not in ends:
                value.name = _unused(f"{place}{as_value}{f'.{i}' if i else ''}", used)
        operators.append(ExportedOperator(node.name, origin.name or place, origin.operator))
    for value in [*graph.inputs, *graph.outputs]:
        value.metadata_props.clear()
    model.metadata_props.clear()
    graph.metadata_props.clear()
    return operators


def _name_outputs(graph: Any, names: list[str]) -> None:
    """Name results as the user would; a tensor that is returned twice, or is an input, keeps its first name."""
    used = {v.name for v in graph.inputs}
    named = {id(v) for v in graph.inputs}
    for value, name in zip(graph.outputs, names, strict=True) if len(names) == len(graph.outputs) else ():
        if id(value) not in named:
            named.add(id(value))
            value.name = _unused(name, used)


def _prefixes(name: str) -> list[str]:
    """The qualified names that a parameter's name may begin with, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def _deepest(scopes: list[str], calls: dict[str, Origin]) -> tuple[str, Origin]:
    return next(((s, calls[s]) for s in scopes if s and s in calls), ("", Origin("")))


def _unused(wish: str, used: set[str]) -> str:
    """The name in characters that every runtime accepts, with a number if it is taken."""
    plain = re.sub(r"[^\w./-]", "_", wish, flags=re.ASCII)
    free = next(n for n in (plain if i == 1 else f"{plain}/{i}" for i in itertools.count(1)) if n not in used)
    used.add(free)
    return free
