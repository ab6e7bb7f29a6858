"""Topological order: each thing after those it waits for, and otherwise in the order given."""

import graphlib
import heapq
import itertools
from collections.abc import Collection, Mapping
from typing import TypeVar

from torch import fx

from bitwright.errors import ConfigError

T = TypeVar("T")


def in_order(earlier: Mapping[T, Collection[T]]) -> list[T]:
    """Sort the keys, each after those it waits for and else as they come; raises ``graphlib.CycleError``."""
    sorter = graphlib.TopologicalSorter(earlier)
    sorter.prepare()
    keys, ready, order = list(earlier), [], []
    place = {key: i for i, key in enumerate(keys)}
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, place[key])
        order.append(keys[heapq.heappop(ready)])
        sorter.done(order[-1])
    return order


def sort_nodes(graph: fx.Graph) -> None:
    """Put each node of a graph after what it reads, and otherwise keep the order."""
    try:
        order = in_order({node: node.all_input_nodes for node in graph.nodes})
    except graphlib.CycleError as error:
        stuck = ", ".join(dict.fromkeys(node.name for node in error.args[1]))
        raise ConfigError(f"nodes of the graph read each other in a cycle: {stuck}") from error
    for before, after in itertools.pairwise(order):
        before.append(after)
