"""A sketch of a graph: what is needed to draw it after the graph itself was rewritten."""

from dataclasses import dataclass
from typing import Literal

from torch import fx

from bitwright.graph.facts import facts
from bitwright.graph.match.index import instance_of
from bitwright.graph.names import node_name
from bitwright.quantizer import TensorQuantizer

Role = Literal["input", "output", "operator", "quantizer"]


@dataclass(frozen=True)
class NodeSketch:
    """One node: what the user calls it, what it calls, the module it was written in, and the nodes it reads."""

    node: str
    name: str
    kind: str
    scope: str
    role: Role
    inputs: tuple[str, ...]


def sketch(model: fx.GraphModule) -> tuple[NodeSketch, ...]:
    """Sketch how tensors flow through a graph, without parameters and size arithmetic."""
    sketched: dict[str, NodeSketch] = {}
    for node in model.graph.nodes:
        if node.op == "get_attr" or facts(node).plain:
            continue
        instance = instance_of(node, model)
        role: Role = "operator"
        kind = node.target if node.op == "call_method" else getattr(instance, "__name__", type(instance).__name__)
        if node.op in ("placeholder", "output"):
            role, kind = ("input" if node.op == "placeholder" else "output"), ""
        elif isinstance(instance, TensorQuantizer):
            role, kind = "quantizer", str(instance.spec)
        inputs = tuple(n.name for n in node.all_input_nodes if n.name in sketched)
        sketched[node.name] = NodeSketch(node.name, node_name(node), str(kind), facts(node).scope, role, inputs)
    return tuple(sketched.values())
