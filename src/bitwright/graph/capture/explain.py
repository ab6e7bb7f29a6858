"""Explain a capture: a tree of what was captured, what runs as written, what was kept whole, and why."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bitwright.graph.capture.guards import Guard
from bitwright.graph.capture.leaves import Leaf
from bitwright.graph.capture.run import Capture, capture_model
from bitwright.graph.facts import facts


@dataclass(frozen=True)
class Place:
    """One module in the tree.

    Attributes:
        path: its qualified name; "" is the model.
        kind: its class.
        state: ``captured`` (has its own graph), ``traced`` (part of the graph above it), ``layer`` (called by a
            graph as one operation), ``island`` (runs as written), ``leaf`` (kept whole), ``single``
            (called by an island) or ``unused``.
        why: the reason, where there is one.
    """

    path: str
    kind: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """What capture would make of a model; ``print`` it."""

    places: list[Place]
    guards: list[Guard]
    nodes: int

    def __str__(self) -> str:
        return "\n".join([*self._tree(), *self._summary()])

    __repr__ = __str__

    def _tree(self) -> Iterator[str]:
        for place in self.places:
            depth = place.path.count(".") + 1 if place.path else 0
            name = place.path.rpartition(".")[2] or "(the model)"
            why = f": {place.why}" if place.why else ""
            yield f"{'  ' * depth}{name} [{place.kind}] {place.state}{why}"

    def _summary(self) -> Iterator[str]:
        count = sum(place.state == "captured" for place in self.places)
        yield f"{count} graph{'s' * (count != 1)} with {self.nodes} nodes"
        if self.guards:
            yield "The graphs hold for inputs that give the same numbers, and refuse others:"
            yield from (f"  {guard}" for guard in self.guards)


def explain_capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    leaves: Iterable[Leaf] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain what ``bw.prepare`` would and would not capture of a model, and why, with the user's file and line."""
    result = capture_model(model, example_inputs, leaves=leaves, concrete_args=concrete_args)
    return Explanation(
        list(_places(model, result)),
        result.guards,
        sum(len(region.graph.nodes) for region in result.regions.values()),
    )


def _places(model: nn.Module, result: Capture) -> Iterator[Place]:
    called = _called(result)
    for path, module in model.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{leaf}.") for leaf in result.leaves):
            continue
        yield Place(path, type(module).__name__, *_state(path, module, result, called))


def _state(path: str, module: nn.Module, result: Capture, called: dict[str, str]) -> tuple[str, str]:
    if path in result.leaves:
        return "leaf", result.leaves[path]
    if path in result.islands:
        return "island", result.islands[path]
    if path in result.regions:
        return "captured", f"{len(result.regions[path].graph.nodes)} nodes"
    if path in result.loose:
        return "single", "called by an island"
    if path in called:
        return called[path], ""
    inside = any(p.startswith(f"{path}.") for p in (*called, *result.islands, *result.regions, *result.loose))
    return ("traced", "") if inside else ("unused", "")


def _called(result: Capture) -> dict[str, str]:
    """Modules that graphs call, and those whose own code the graphs were recorded from."""
    found: dict[str, str] = {}
    for prefix, region in result.regions.items():
        start = f"{prefix}." if prefix else ""
        for node in region.graph.nodes:
            scope = facts(node).scope
            if scope:
                found.setdefault(start + scope, "traced")
            if node.op == "call_module":
                found[start + str(node.target)] = "layer"
            elif node.op == "get_attr":
                found.setdefault(start + str(node.target).rpartition(".")[0], "traced")
    return found
