"""Put a graph's nodes into an order in which each comes after what it reads, moving as few as possible."""

import heapq
import itertools

from torch import fx

from bitwright.errors import ConfigError


def sort_nodes(graph: fx.Graph) -> None:
    """Sort in place; nodes keep their order where nothing speaks against it."""
    nodes = list(graph.nodes)
    order = _sorted(nodes)
    if len(order) < len(nodes):
        stuck = ", ".join(n.name for n in nodes if n not in order)
        raise ConfigError(f"nodes of the graph read each other in a circle: {stuck}")
    for before, after in itertools.pairwise(order):
        before.append(after)


def _sorted(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    """Those that can be put in order, always the earliest that has all that it reads."""
    place = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node, count in missing.items() if count == 0]
    order: dict[fx.Node, None] = {}
    while ready:
        node = nodes[heapq.heappop(ready)]
        order[node] = None
        for user in node.users:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, place[user])
    return order
