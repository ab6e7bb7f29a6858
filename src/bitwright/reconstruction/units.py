"""Units: the runs of nodes that reconstruction improves together, found in a prepared graph.

The graph is cut wherever only a single tensor that quantization changes is alive. Between two cuts there is a residual
block, an attention with its sum, or a layer. Pieces of one module are joined if modules of that class form such blocks
elsewhere, so inverted residuals without a shortcut become units like those with one. Pieces with too many layers are
split again, by the modules inside them or layer by layer, so a unit may have several results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, takewhile

from torch import fx, nn

from bitwright.graph.facts import facts, is_floating, shape_of
from bitwright.graph.names import module_of
from bitwright.quantizer import TensorQuantizer, quantizers

MOST_LAYERS = 16
"""A piece with more layers than these is split."""

Nodes = list[fx.Node]
Changes = Callable[[TensorQuantizer], bool]


@dataclass(frozen=True, eq=False)
class Unit:
    """A run of nodes.

    Attributes:
        name: its module or layers.
        nodes: in the order of the graph.
        inputs: the nodes outside whose values it reads.
        outputs: the nodes whose values are read outside.
        moving: the nodes whose values quantization changes.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    moving: frozenset[fx.Node]


class _Graph:
    """A graph as a list of calls, with what is known about each."""

    def __init__(self, model: fx.GraphModule, learns: Callable[[fx.Node], bool], changes: Changes) -> None:
        self.model, self.changes = model, changes
        self.calls = [n for n in model.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.index = {node: i for i, node in enumerate(self.calls)}
        self.layers = {node for node in self.calls if learns(node)}
        self.moving = self._moving()

    def _moving(self) -> set[fx.Node]:
        """The nodes whose results quantization changes."""
        found: set[fx.Node] = set()
        for node in self.calls:
            module = module_of(node, self.model)
            changes = module is not None and any(map(self.changes, quantizers(module).values()))
            if changes or any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def last_use(self, node: fx.Node) -> int:
        return max((self.index.get(user, len(self.calls)) for user in node.users), default=-1)

    def pieces(self) -> list[Nodes]:
        """The runs between points where only one moving tensor is alive.

        What comes after a layer and keeps its shape (an activation, a quantizer) belongs to it; what changes the shape
        (pooling) belongs to what follows, so that results are compared before it.
        """
        pieces: list[Nodes] = [[]]
        alive: dict[fx.Node, int] = {}
        for i, node in enumerate(self.calls):
            pieces[-1].append(node)
            if node in self.moving and not facts(node).plain:
                alive[node] = self.last_use(node)
            alive = {n: last for n, last in alive.items() if last > i}
            if len(alive) == 1 and is_floating(next(iter(alive))):
                pieces.append([])
        return self._joined([p for p in pieces if p])

    def _joined(self, pieces: list[Nodes]) -> list[Nodes]:
        joined: list[Nodes] = []
        for piece in pieces:
            before = joined[-1] if joined else []
            same = bool(before) and shape_of(before[-1]) == shape_of(piece[-1])
            if before and (not self.count(before) or (not self.count(piece) and same)):
                before += piece
            else:
                joined.append(list(piece))
        return joined

    def count(self, nodes: Nodes) -> int:
        return sum(node in self.layers for node in nodes)

    def by_layer(self, piece: Nodes) -> list[Nodes]:
        """A piece cut before each of its layers."""
        starts = [i for i, node in enumerate(piece) if node in self.layers][1:]
        return [piece[a:b] for a, b in pairwise([0, *starts, len(piece)])]

    def scope(self, piece: Nodes) -> str:
        """The module that has all calls of a piece from its first layer on, quantizers aside."""
        first = next((i for i, node in enumerate(piece) if node in self.layers), 0)
        counted = [n for n in piece[first:] if n in self.layers or not self._is_quantizer(n)]
        return self._module_with(counted or piece)

    def _module_with(self, nodes: Nodes) -> str:
        """The innermost module that has all these calls; containers do not count."""
        scope = _common_scope([facts(n).scope for n in nodes])
        while scope and isinstance(self.model.get_submodule(scope), nn.Sequential | nn.ModuleList):
            scope = scope.rpartition(".")[0]
        return scope

    def _is_quantizer(self, node: fx.Node) -> bool:
        return isinstance(module_of(node, self.model), TensorQuantizer)

    def by_module(self, piece: Nodes) -> list[Nodes]:
        """A piece of too many layers, split by the modules inside it, or by layers."""
        if self.count(piece) <= MOST_LAYERS:
            return [piece]
        depth = len(self.scope(piece).split(".")) if self.scope(piece) else 0
        runs = [list(run) for _, run in groupby(piece, lambda n: facts(n).scope.split(".")[: depth + 1])]
        parts = self._joined(runs)
        if len(parts) == 1:
            return self.by_layer(piece)
        return [small for part in parts for small in self.by_module(part)]

    def by_block(self, pieces: list[Nodes]) -> list[Nodes]:
        """Pieces joined where they are one module of a class that has blocks."""
        scopes = [self.scope(piece) for piece in pieces]
        classes = {
            type(self.model.get_submodule(scope))
            for piece, scope in zip(pieces, scopes, strict=True)
            if scope and self.count(piece) > 1
        }

        def owner(scope: str) -> str | None:
            parts = scope.split(".")
            paths = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
            return next((p for p in paths if p and type(self.model.get_submodule(p)) in classes), None)

        joined: list[Nodes] = []
        owners: list[str | None] = []
        for piece, mine in zip(pieces, map(owner, scopes), strict=True):
            fits = bool(joined) and self.count(joined[-1]) + self.count(piece) <= MOST_LAYERS
            if fits and mine is not None and mine == owners[-1]:
                joined[-1] += piece
            else:
                joined.append(list(piece))
                owners.append(mine)
        return joined

    def unit(self, nodes: Nodes) -> Unit:
        """A run of nodes with what goes in and out."""
        inside = set(nodes)
        read = [n for node in nodes for n in node.all_input_nodes if n not in inside and n.op != "get_attr"]
        written = [n for n in nodes if any(user not in inside for user in n.users)]
        inputs = tuple(dict.fromkeys(read))
        return Unit(self._name(nodes), tuple(nodes), inputs, tuple(written), frozenset(self.moving))

    def _name(self, nodes: Nodes) -> str:
        layers = [n for n in nodes if n in self.layers]
        names = [str(n.target) if n.op == "call_module" else n.name for n in layers]
        if not names:
            return nodes[0].name
        if len(names) == 1:
            return names[0]
        return self._module_with(layers) or f"{names[0]} to {names[-1]}"


def _common_scope(scopes: Sequence[str]) -> str:
    """The names that all these scopes begin with."""
    levels = zip(*(scope.split(".") for scope in scopes), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def find_units(
    model: fx.GraphModule,
    learns: Callable[[fx.Node], bool],
    unit: str,
    merge: int,
    changes: Changes = lambda quantizer: quantizer.quantizes,
) -> list[Unit]:
    """The units of a graph, layers or blocks, in order; together they have all its nodes.

    ``learns`` says whether a call has something to learn, ``changes`` whether a quantizer changes tensors.
    """
    graph = _Graph(model, learns, changes)
    pieces = graph.pieces()
    if unit == "layer":
        runs = [run for piece in pieces for run in graph.by_layer(piece)]
    else:
        runs = graph.by_block([part for piece in pieces for part in graph.by_module(piece)])
    return [graph.unit([*chain(*runs[i : i + merge])]) for i in range(0, len(runs), merge)]
