"""Watch a file's tensors without changing what the runtime computes.

A tensor that is given out cannot be fused away: watched, a runtime may compute other values than it does for users.
So what is watched must leave the outputs as they are, and unrounded what is unrounded; what cannot be watched is named,
with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bitwright.exporting import FileNode, LoadedFile
from bitwright.verification.outputs import as_tensor, difference, magnitude
from bitwright.verification.runtimes.base import Arrays, Executed, Runtime, Session

_SAME = 1e-6  # a share of an output's magnitude; one step of one value, anywhere, makes more
_MOST_TRIES = 24


@dataclass
class Watch:
    """Gives out tensors of a file.

    Attributes:
        fused: tensors that the runtime computes as part of a larger operator, unrounded, with that operator.
        untouched: tensors that the runtime does not compute as usual when watched, with the reason.
    """

    file: LoadedFile
    tensors: list[str] = field(default_factory=list)
    session: Session | None = None
    fused: dict[str, str] = field(default_factory=dict)
    untouched: dict[str, str] = field(default_factory=dict)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """The tensors' values on one batch."""
        if self.session is None:
            return {}
        seen = self.session(feeds)
        names = {t: self.file.output_of(t) for t in self.tensors}
        return {tensor: seen[name] for tensor, name in names.items() if name in seen}


class Watcher:
    """Finds out what of a file can be watched in a runtime.

    Args:
        runtime: the runtime.
        file: the file.
        feeds: a batch.
        results: the outputs on it, of the file as it is.
        executed: what the runtime executed for it.
    """

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
        self.fused = _fused(self.nodes, self.executed)
        self.tries = 0

    def watch(self, tensors: Sequence[str]) -> Watch:
        """Watch as many of the tensors as can be."""
        wanted = list(dict.fromkeys(tensors))
        if not wanted:
            return Watch(self.file)
        whole, same = self._try(wanted)
        if same:
            return whole
        read = _read_by_fusions(self.nodes, self.executed, self.fused)
        kept = self._transparent([t for t in wanted if t not in self.fused and t not in read])
        if kept is None:
            return whole  # nothing can be watched as it is: the comparison of outputs will tell
        why = f"{self.runtime.name} computes other values while it is watched; what reads it was compared"
        kept.fused = self.fused
        kept.untouched = {t: why for t in wanted if t not in self.fused and t not in kept.tensors}
        return kept

    def _try(self, tensors: list[str]) -> tuple[Watch, bool]:
        self.tries += 1
        file = self.file.watching(tensors)
        watch = Watch(file, tensors, self.runtime.open(file))
        seen = watch.session(self.feeds) if watch.session is not None else {}
        same = all(_same(value, seen.get(name)) for name, value in self.results.items())
        if same and self.fused:  # what was not rounded must not be rounded now
            same = _fused(self.nodes, self.runtime.profile(file, self.feeds)).keys() == self.fused.keys()
        return watch, same

    def _transparent(self, tensors: list[str]) -> Watch | None:
        """Watch the tensors, or a part of them found by halving, such that the outputs stay the same."""
        if not tensors or self.tries > _MOST_TRIES:
            return None
        watch, same = self._try(tensors)
        if same or len(tensors) == 1:
            return watch if same else None
        half = len(tensors) // 2
        parts = [p for p in (self._transparent(tensors[:half]), self._transparent(tensors[half:])) if p is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        both, same = self._try([t for part in parts for t in part.tensors])
        return both if same else max(parts, key=lambda part: len(part.tensors))


def _same(expected: np.ndarray, seen: np.ndarray | None) -> bool:
    if seen is None or expected.shape != seen.shape:
        return False
    ours, theirs = as_tensor(expected), as_tensor(seen)
    gap = difference(ours, theirs)
    return not gap.numel() or float(gap.max()) <= _SAME * magnitude(ours)


def _fused(nodes: list[FileNode], executed: list[Executed]) -> dict[str, str]:
    """The integers that an executed operator makes on the way to its result, with what the runtime calls it."""
    order = {node.name: i for i, node in enumerate(nodes)}
    found = {}
    for operator in executed:
        inside = sorted(order[n] for n in operator.nodes if n in order)
        members = [nodes[i] for i in inside if nodes[i].type != "DequantizeLinear"]
        for node in members[:-1]:
            if node.type == "QuantizeLinear":
                found[node.outputs[0]] = ", ".join(m.name for m in members if m.type != "QuantizeLinear")
    return found


def _read_by_fusions(nodes: list[FileNode], executed: list[Executed], fused: Mapping[str, str]) -> set[str]:
    """The integers that such an operator reads, which it may overwrite."""
    makers = {output: node for node in nodes for output in node.outputs}
    by_name = {node.name: node for node in nodes}
    quantizers = {node.name for node in nodes if node.outputs[0] in fused}
    read = set()
    for operator in executed:
        if quantizers.intersection(operator.nodes):
            for tensor in (t for n in operator.nodes if n in by_name for t in by_name[n].inputs):
                maker = makers.get(tensor)
                if maker is not None and maker.type == "DequantizeLinear":
                    read.add(maker.inputs[0])
    return read - set(fused)
