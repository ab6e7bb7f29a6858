"""Put a graph's nodes into an order in which each comes after what it reads, moving as few as possible."""

import heapq
import itertools

from torch import fx

from bitwright.errors import ConfigError


def sort_nodes(graph: fx.Graph) -> None:
    """Sort in place; nodes keep their order where nothing speaks against it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in place}
    ready = [place[node] for node, count in missing.items() if count == 0]
    heapq.heapify(ready)
    nodes = list(place)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, place[user])
    if len(order) < len(nodes):
        stuck = ", ".join(n.name for n in nodes if missing[n])
        raise ConfigError(f"nodes of the graph read each other in a circle: {stuck}")
    for before, after in itertools.pairwise(order):
        before.append(after)
