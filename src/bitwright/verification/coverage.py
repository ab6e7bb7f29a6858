"""Coverage: which of the operators that a runtime executed ran in integers, which in float, and why."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from bitwright.exporting import LoadedFile
from bitwright.preparation import Ledger
from bitwright.verification.proof import OperatorCheck, RuntimeProof
from bitwright.verification.runtimes.base import Executed, Runtime

_FLOAT_VERDICTS = ("float", "partly")


def add_coverage(
    proof: RuntimeProof,
    runtime: Runtime,
    executed: list[Executed],
    file: LoadedFile,
    ledger: Ledger | None,
    feeds: Mapping[str, np.ndarray],
) -> None:
    """Add what was executed to the proof."""
    work = file.multiply_adds(feeds)
    namer = _Namer(runtime, file, ledger, set(work))
    proof.operators = [_check(e, namer, work) for e in executed if e.role == "compute"]
    proof.others = dict(Counter(str(e.role) for e in executed if e.role != "compute"))
    claimed = {name for e in executed for name in e.nodes}
    proof.unweighed = namer.names(tuple(name for name in work if name not in claimed))


def _check(executed: Executed, namer: "_Namer", work: Mapping[str, int | None]) -> OperatorCheck:
    counts = [work[name] for name in executed.nodes if name in work]
    return OperatorCheck(
        name=", ".join(namer.names(executed.nodes)) or executed.runs_as,
        kind=namer.kind(executed),
        integer=executed.integer,
        runs_as=executed.runs_as,
        reason="" if executed.integer else namer.reason(executed),
        multiply_adds=None if None in counts else sum(c or 0 for c in counts),
        microseconds=executed.microseconds,
        nodes=executed.nodes,
    )


class _Namer:
    """Names the file's operators in the user's terms."""

    def __init__(self, runtime: Runtime, file: LoadedFile, ledger: Ledger | None, heavy: set[str]) -> None:
        self._runtime, self._heavy = runtime, heavy
        entries = ledger.entries if ledger is not None else ()
        operators = file.record.operators if file.record is not None else ()
        self._types = {node.name: node.type for node in file.nodes()}
        self._origins = {o.node: o for o in operators}
        self._has_heavy = Counter(o.name for o in operators if o.node in heavy)
        self._reasons = {e.name: e.reason for e in entries if e.verdict.value in _FLOAT_VERDICTS and e.reason}

    def names(self, nodes: tuple[str, ...]) -> list[str]:
        """The user's modules and nodes, in order."""
        main = [n for n in self._main(nodes) if n in self._origins]
        return list(dict.fromkeys(self._origins[n].name for n in main))

    def kind(self, executed: Executed) -> str:
        """What it computes: Bitwright's term, or the file's for a part (the bias of a layer), or the runtime's."""
        for node in self._main(executed.nodes):
            if node in self._origins:
                origin = self._origins[node]
                part = node not in self._heavy and self._has_heavy[origin.name]
                return (not part and origin.operator) or self._types.get(node, "").lower() or executed.runs_as
        return executed.runs_as

    def reason(self, executed: Executed) -> str:
        """Why it ran in float."""
        for node in executed.nodes:
            if why := self._runtime.reasons.get(self._types.get(node, "")):
                return why
        for name in self.names(executed.nodes):
            if why := self._reasons.get(name):
                return why
        return f"{self._runtime.name} did not fuse it with its quantizers"

    def _main(self, nodes: tuple[str, ...]) -> list[str]:
        """The nodes that compute, if any, heaviest first."""
        computing = [n for n in nodes if self._types.get(n) not in ("QuantizeLinear", "DequantizeLinear")]
        return sorted(computing, key=lambda n: n not in self._heavy) or list(nodes)
