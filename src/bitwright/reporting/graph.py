"""The picture of a graph: operators in layers, from inputs to outputs, coloured by how they compute.

A large graph is drawn by the modules it was written in: neighbours of one module become one box.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup, escape
from torch import nn

from bitwright.graph import CapturedModel
from bitwright.graph.sketch import NodeSketch, sketch
from bitwright.preparation import Ledger, Verdict
from bitwright.reporting.text import count

_MOST = 120  # boxes; larger graphs are drawn by modules
_WIDTH, _HEIGHT, _GAP, _STEP, _EDGE = 190, 30, 22, 58, 16
_LETTERS = 27


@dataclass
class Picture:
    """One graph of a model, as captured (if known) and as it is now."""

    title: str
    before: Markup | None
    after: Markup


@dataclass(eq=False)
class _Box:
    label: str
    title: str
    role: str
    scope: str
    inputs: dict["_Box", None] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    width: float = _WIDTH
    layer: int = 0
    x: float = 0.0  # of its middle
    y: float = 0.0


def pictures(model: nn.Module, ledger: Ledger) -> list[Picture]:
    """A picture of every graph in a prepared model."""
    made = []
    for path, region in model.named_modules():
        if not isinstance(region, CapturedModel):
            continue
        now, before = sketch(region), ledger.before.get(path)
        verdicts = {entry.node: entry.verdict for entry in ledger.entries if entry.graph == path}
        name = path or "the model"
        captured = _as_captured(before, now, f"{name} as captured") if before else None
        made.append(Picture(path or "The whole model", captured, draw(now, verdicts, (), f"{name} now")))
    return made


def _as_captured(before: Sequence[NodeSketch], now: Sequence[NodeSketch], title: str) -> Markup:
    left = {s.name for s in now}
    gone = {s.node for s in before if s.role == "operator" and s.name not in left}
    return draw(before, {}, gone, title)


def draw(
    nodes: Sequence[NodeSketch],
    verdicts: Mapping[str, Verdict],
    gone: Sequence[str] | set[str] = (),
    title: str = "graph",
) -> Markup:
    """Draw a graph as SVG; ``gone`` are nodes to mark as replaced later."""
    boxes = _boxes(nodes, verdicts, gone)
    places = _layers(boxes)
    width, height = _lay_out(places)
    lines = [f'<path class="edge" d="{_curve(i, box)}"/>' for layer in places for box in layer for i in box.inputs]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg class="graph" role="img" {size}><title>{escape(title)}</title>'
    return Markup("".join([head, *lines, *(_shape(box) for box in boxes), "</svg>"]))


def _boxes(nodes: Sequence[NodeSketch], verdicts: Mapping[str, Verdict], gone: Sequence[str] | set[str]) -> list[_Box]:
    """The boxes in the graph's order: one for each node or, in a large graph, for each run of nodes in one module."""
    group = _grouping(nodes)
    boxes: list[_Box] = []
    at: dict[str, _Box] = {}
    members: defaultdict[_Box, list[NodeSketch]] = defaultdict(list)
    for node, key in zip(nodes, group, strict=True):
        if not boxes or boxes[-1].scope != key:  # None, which has a box of its own, equals no scope
            boxes.append(_first_box(node, key or "", node.node in gone))
        box = at[node.node] = boxes[-1]
        members[box].append(node)
        box.inputs.update({at[i]: None for i in node.inputs if i in at and at[i] is not box})
    for box, those in members.items():
        _describe(box, those, verdicts)
    return boxes


def _first_box(node: NodeSketch, scope: str, gone: bool) -> _Box:
    role = f"{node.role} gone" if gone else node.role
    return _Box(_short(node.name), f"{node.name} {node.kind}".strip(), role, scope)


def _describe(box: _Box, members: Sequence[NodeSketch], verdicts: Mapping[str, Verdict]) -> None:
    """Label and colour a box by its nodes."""
    inside = [s for s in members if s.role == "operator"]
    box.verdicts.update(verdicts[s.node].value for s in inside if s.node in verdicts)
    if len(members) > 1:
        box.label, box.role = _short(box.scope, f" · {len(inside)}"), "module"
        kinds = ", ".join(f"{many} {kind}" for kind, many in box.verdicts.items())
        box.title = f"{box.scope}: {count(len(inside), 'operator')}, {kinds}"
    elif inside:
        box.role += "".join(f" {kind}" for kind in box.verdicts)
    elif members[0].role == "quantizer":
        box.label, box.width = _short(members[0].kind.split(" ")[0]), _WIDTH / 2


def _grouping(nodes: Sequence[NodeSketch]) -> list[str | None]:
    """For each node, the module to draw it with, as deep as the picture allows, or None for the node itself."""
    if len(nodes) <= _MOST:
        return [None] * len(nodes)
    best: list[str | None] = []
    for depth in range(1, 1 + max(s.scope.count(".") + 1 for s in nodes)):
        found = [".".join(s.scope.split(".")[:depth]) or None for s in nodes]
        runs = 1 + sum(key is None or before != key for before, key in pairwise(found))
        if not best or runs <= _MOST:
            best = found
    return best


def _layers(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """Put every box below everything it reads; an edge across several layers gets a narrow slot in each."""
    for box in boxes:
        box.layer = 1 + max((i.layer for i in box.inputs), default=-1)
    layers: list[list[_Box]] = [[] for _ in range(1 + max((b.layer for b in boxes), default=0))]
    for box in boxes:
        layers[box.layer].append(box)
    bends: dict[tuple[_Box, int], _Box] = {}
    for box in boxes:
        for source in list(box.inputs):
            last = source
            for level in range(source.layer + 1, box.layer):
                if (source, level) not in bends:
                    bends[source, level] = _Box("", "", "bend", "", {last: None}, width=_GAP, layer=level)
                    layers[level].append(bends[source, level])
                last = bends[source, level]
            del box.inputs[source]
            box.inputs[last] = None
    return layers


def _lay_out(layers: Sequence[Sequence[_Box]]) -> tuple[float, float]:
    """Place every box, centred below what it reads; return the total size."""
    for level, layer in enumerate(layers):
        _lay_out_row(layer, _EDGE + level * _STEP)
    everything = [box for layer in layers for box in layer]
    leftmost = min((b.x - b.width / 2 for b in everything), default=0.0) - _EDGE
    for box in everything:
        box.x -= leftmost
    width = max((b.x + b.width / 2 for b in everything), default=0.0) + _EDGE
    return width, 2 * _EDGE + _HEIGHT + _STEP * (len(layers) - 1)


def _lay_out_row(row: Sequence[_Box], y: float) -> None:
    wish = {box: _middle(box.inputs) for box in row}
    order = sorted(row, key=wish.__getitem__)
    for left, box in zip([None, *order], order, strict=False):
        free = left.x + (left.width + box.width) / 2 + _GAP if left is not None else wish[box]
        box.x, box.y = max(wish[box], free), y
    firm = [b for b in row if b.role != "bend"]
    shift = sum(wish[b] - b.x for b in firm) / max(len(firm), 1)
    for box in row:
        box.x += shift


def _middle(boxes: Iterable[_Box]) -> float:
    chosen = [b.x for b in boxes if b.role != "bend"] or [b.x for b in boxes] or [0.0]
    return sum(chosen) / len(chosen)


def _shape(box: _Box) -> str:
    x, y, width = box.x - box.width / 2, box.y, box.width
    parts = [f'<g class="{box.role}"><title>{escape(box.title)}</title>']
    parts.append(f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.0f}" height="{_HEIGHT}" rx="6"/>')
    total, start = sum(box.verdicts.values()), x
    for kind, many in box.verdicts.items() if box.role == "module" else ():
        part = f'x="{start:.1f}" y="{y + _HEIGHT - 5:.1f}" width="{many / total * width:.1f}" height="5"'
        parts.append(f'<rect class="{kind}" {part}/>')
        start += many / total * width
    parts.append(f'<text x="{box.x:.1f}" y="{y + _HEIGHT / 2 + 4:.1f}">{escape(box.label)}</text></g>')
    return "".join(parts)


def _curve(source: _Box, target: _Box) -> str:
    """A curve from one to the other, straight down where the edge passes a layer."""
    past = f"M{source.x:.1f} {source.y:.1f}v{_HEIGHT}" if source.role == "bend" else ""
    y1, y2 = source.y + _HEIGHT, target.y
    ends = f"{source.x:.1f} {(y1 + y2) / 2:.1f} {target.x:.1f} {(y1 + y2) / 2:.1f} {target.x:.1f} {y2:.1f}"
    return f"{past}M{source.x:.1f} {y1:.1f}C{ends}"


def _short(name: str, after: str = "") -> str:
    room = _LETTERS - len(after)
    return (name if len(name) <= room else "…" + name[-(room - 1) :]) + after
