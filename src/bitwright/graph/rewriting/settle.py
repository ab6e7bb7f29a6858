"""Stop repeated rewrites that never end: limits by the size of the graph, and graphs seen before."""

from collections import Counter

from bitwright.graph.match.index import GraphIndex

_FEW = 2  # rounds that need no watching
_SAME = 48  # times that one structure may come up after them, since a rewrite may change only weights
_SPARE = 100


class Settling:
    """Watches the graph after each round of rewriting."""

    def __init__(self, index: GraphIndex) -> None:
        self.size = len(index.position)
        self._rounds = 0
        self._first = 0
        self._seen: Counter[int] = Counter()

    def may_go_on(self, index: GraphIndex, rewritten: int) -> bool:
        """Whether another round is allowed; ``rewritten`` counts the matches so far."""
        self._rounds += 1
        self._first = self._first or rewritten  # those of the graph as it was, however many
        if self._rounds <= _FEW:
            return True
        shape = _structure(index)
        self._seen[shape] += 1
        in_bounds = self._rounds <= self.size + _SPARE and rewritten <= self._first + 20 * (self.size + _SPARE)
        return in_bounds and self._seen[shape] <= _SAME


def _structure(index: GraphIndex) -> int:
    """A hash of what the nodes call and how they are connected, but not of their names."""
    place = index.position
    return hash(tuple((index.kind(node), *(place[i] for i in index.inputs(node))) for node in place))
