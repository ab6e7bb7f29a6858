"""Subgraph: a run of nodes as a separate module, which calls the modules of the original model."""

from collections.abc import Sequence

from torch import fx


def subgraph(
    model: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A module that takes the values of ``inputs`` and returns those of ``outputs`` as a tuple."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in inputs}

    def find(node: fx.Node) -> fx.Node:
        if node not in known and node.op == "get_attr":
            known[node] = graph.node_copy(node)
        return known[node]

    for node in nodes:
        known[node] = graph.node_copy(node, find)
    graph.output(tuple(known[node] for node in outputs))
    return fx.GraphModule(model, graph, "Unit")
