"""Watch a file's tensors without changing what the runtime computes.

A tensor that is an output cannot be fused away, so a watched runtime may compute other values than it does for users.
Watching must therefore leave the outputs unchanged, and keep unrounded what is unrounded. Tensors that cannot be
watched are named, with the reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bitwright.exporting import FileNode, LoadedFile
from bitwright.verification.outputs import as_tensor, difference, magnitude
from bitwright.verification.runtimes.base import Arrays, Executed, Runtime, Session

_SAME = 1e-6  # share of an output's magnitude; one step of any value makes a larger difference
_MOST_TRIES = 48
_MOST_BYTES = 2**31  # bytes of files in sessions that are open at once


@dataclass
class View:
    """A session that exposes some tensors of a file."""

    file: LoadedFile
    tensors: list[str]
    session: Session

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        seen = self.session(feeds)
        names = {t: self.file.output_of(t) for t in self.tensors}
        return {tensor: seen[name] for tensor, name in names.items() if name in seen}


@dataclass
class Watch:
    """Exposes tensors of a file.

    Attributes:
        views: the sessions that do so, each for some of the tensors.
        fused: tensors that the runtime computes as part of a larger operator, unrounded, with that operator.
        untouched: tensors that the runtime does not compute as usual when watched, with the reason.
    """

    views: list[View] = field(default_factory=list)
    fused: dict[str, str] = field(default_factory=dict)
    untouched: dict[str, str] = field(default_factory=dict)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        return {tensor: value for view in self.views for tensor, value in view(feeds).items()}


class Watcher:
    """Finds out which tensors of a file can be watched in a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        file: LoadedFile,
        feeds: Mapping[str, np.ndarray],
        results: Mapping[str, np.ndarray],
        executed: list[Executed],
    ) -> None:
        self.runtime, self.file, self.feeds, self.results = runtime, file, feeds, results
        self.nodes, self.executed = file.nodes(), executed
        self.named = _as_named(self.nodes, file.inputs, file.outputs)
        self.fused = _fused(self.named, self.executed)
        self.tries = 0

    def watch(self, tensors: Sequence[str]) -> Watch:
        """Watch as many of the tensors as possible."""
        wanted = list(dict.fromkeys(tensors))
        if not wanted:
            return Watch()
        whole, same = self._try(wanted)
        if same:
            return Watch([whole])
        overwritten = _overwritten(self.named, self.executed)
        views = self._transparent([t for t in wanted if t not in self.fused and t not in overwritten])
        views += [view for t in wanted if t in overwritten for view in self._beginning(t)]
        if not views:
            return Watch([whole])  # nothing can be watched unchanged: the comparison of outputs will tell
        seen = {t for view in views for t in view.tensors}
        why = f"{self.runtime.name} computes other values while it is watched; its readers were compared"
        return Watch(views, self.fused, {t: why for t in wanted if t not in self.fused and t not in seen})

    def _may_try(self) -> bool:
        return self.tries < _MOST_TRIES and self.tries * self.file.size < _MOST_BYTES

    def _open(self, file: LoadedFile, tensors: list[str]) -> View:
        self.tries += 1
        return View(file, tensors, self.runtime.open(file))

    def _try(self, tensors: list[str]) -> tuple[View, bool]:
        view = self._open(self.file.watching(tensors), tensors)
        seen = view.session(self.feeds)
        same = all(_same(value, seen.get(name)) for name, value in self.results.items())
        return view, same and (not self.fused or self._fuses(view.file))

    def _transparent(self, tensors: list[str]) -> list[View]:
        """Watch the tensors without changing the outputs, all at once or in parts found by halving."""
        if not tensors or not self._may_try():
            return []
        view, same = self._try(tensors)
        if same:
            return [view]
        if len(tensors) == 1:
            return self._beginning(tensors[0])
        half = len(tensors) // 2
        return [*self._transparent(tensors[:half]), *self._transparent(tensors[half:])]

    def _beginning(self, tensor: str) -> list[View]:
        """Watch a tensor as the result of what precedes it, where nothing can overwrite it or be fused with it."""
        count = next((i + 1 for i, node in enumerate(self.nodes) if tensor in node.outputs), 0)
        file = self.file.beginning(count) if count and self._may_try() else None
        if file is None or tensor not in file.outputs:
            return []
        view = self._open(file, [tensor])
        return [view] if tensor in view(self.feeds) and self._fuses(file, self._needed(tensor)) else []

    def _fuses(self, file: LoadedFile, among: set[str] | None = None) -> bool:
        """Whether the same tensors are unrounded in a file as usual: all, or those among some."""
        changed = self.fused.keys() ^ _fused(self.named, self.runtime.profile(file, self.feeds)).keys()
        return not (changed if among is None else changed & among)

    def _needed(self, tensor: str) -> set[str]:
        """The tensors that one is computed from, and itself."""
        needed = {tensor}
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
        return needed


def _same(expected: np.ndarray, seen: np.ndarray | None) -> bool:
    if seen is None or expected.shape != seen.shape:
        return False
    ours, theirs = as_tensor(expected), as_tensor(seen)
    gap = difference(ours, theirs)
    return not gap.numel() or float(gap.max()) <= _SAME * magnitude(ours)


def _as_named(nodes: list[FileNode], inputs: Iterable[str], outputs: Iterable[str]) -> list[FileNode]:
    """The nodes, as far as OpenVINO's names identify them.

    A sum that adds a stored bias to a convolution's result is part of the convolution, and a quantizer whose values are
    a result has the name of its dequantizer.
    """
    computed, convolved, results, kept = set(inputs), set[str](), set(outputs), list[FileNode]()
    for node in nodes:
        computed.update(node.outputs if computed.intersection(node.inputs) else ())
        convolved.update(node.outputs if node.type == "Conv" else ())
        if node.type == "Add" and convolved.intersection(node.inputs) and not computed.issuperset(node.inputs):
            continue
        given = node.type == "DequantizeLinear" and results.intersection(node.outputs)
        kept.append(replace(node, type="QuantizeLinear") if given else node)
    return kept


def _fused(nodes: list[FileNode], executed: list[Executed]) -> dict[str, str]:
    """The integers inside a convolution that are not rounded on the way to its result, with what it computes.

    OpenVINO rounds where it fuses a quantizer with other operators, except in one case: a convolution that itself adds
    another tensor to its quantized result, and quantizes it again.
    """
    found = {}
    for members in _members(nodes, executed):
        kinds = [node.type for node in members]
        if kinds[:2] == ["Conv", "QuantizeLinear"] and "QuantizeLinear" in kinds[2:] and "Add" in kinds[2:]:
            found[members[1].outputs[0]] = ", ".join(m.name for m in members if m.type != "QuantizeLinear")
    return found


def _overwritten(nodes: list[FileNode], executed: list[Executed]) -> set[str]:
    """The integers that a convolution overwrites, because it adds them to its own result."""
    dequantized = {node.outputs[0]: node.inputs[0] for node in nodes if node.type == "DequantizeLinear"}
    found = set()
    for first, *rest in _members(nodes, executed):
        if first.type == "Conv":
            added = {dequantized.get(t, "") for node in rest if node.type == "Add" for t in node.inputs}
            found |= added.difference([""], *(node.outputs for node in (first, *rest)))
    return found


def _members(nodes: list[FileNode], executed: list[Executed]) -> Iterator[list[FileNode]]:
    """The file's nodes that each executed convolution computes, in their order, without those that dequantize."""
    order = {node.name: i for i, node in enumerate(nodes)}
    for operator in (each for each in executed if each.runs_as.startswith("Convolution")):
        inside = [nodes[i] for i in sorted(order[n] for n in operator.nodes if n in order)]
        if members := [node for node in inside if node.type != "DequantizeLinear"]:
            yield members
