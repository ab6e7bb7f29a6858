"""diagnose: test which reason explains why a runtime deviates."""

from collections.abc import Mapping

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification.diagnosis.subject import Cut, Subject, around
from bitwright.verification.diagnosis.trials import TRIALS, Trial
from bitwright.verification.proof import Diagnosis
from bitwright.verification.runtimes.base import RUNTIMES, Runtime

_ALLOWED = 1  # step


def diagnose(
    runtime: Runtime, file: LoadedFile, feeds: Mapping[str, np.ndarray], name: str, tensor: str
) -> Diagnosis | None:
    """Test reasons why a runtime deviates at a tensor on some inputs; returns None for files that cannot be cut."""
    if not isinstance(file, OnnxFile) or file.format != "onnx" or not tensor:
        return None
    found = Diagnosis(name)
    try:
        _Examination(runtime, RUNTIMES.get("reference")(), file, feeds, tensor).run(found)
    except VerifyError as error:
        found.problem = str(error)
    return found


class _Examination:
    def __init__(
        self, runtime: Runtime, book: Runtime, file: OnnxFile, feeds: Mapping[str, np.ndarray], tensor: str
    ) -> None:
        self.runtime, self.book, self.file, self.feeds, self.tensor = runtime, book, file, feeds, tensor

    def run(self, found: Diagnosis) -> None:
        cut = around(self.file, self.tensor, lambda names: self._watched(self.book, names))
        found.alone = self._gap(cut, cut.subject, cut.subject) > _ALLOWED
        if not found.alone:
            whole = Subject(self.file.watching([self.tensor]).proto, self.tensor)
            cut = Cut(whole, dict(self.feeds))
            if self._gap(cut, whole, whole) <= _ALLOWED:
                self._blame(found)
                return
        for trial in sorted(TRIALS.values(), key=lambda t: (t.rank, t.name)):
            if found.reasons and trial.rank > TRIALS.get(found.reasons[0]).rank:
                break
            self._try(trial, cut, found)

    def _blame(self, found: Diagnosis) -> None:
        """Say what deviates where the runtime, from the file's inputs on, computes what ONNX defines."""
        record, name = self.file.record, self.runtime.name
        every = [t.tensor for t in record.tensors if t.tensor and t.kind == "activation"] if record is not None else []
        seen = (self._watched(self.runtime, every), self._watched(self.book, [self.tensor]))
        theirs, ours = (values[self.tensor].astype(np.int64) for values in seen)
        if np.abs(ours - theirs).max(initial=0) <= _ALLOWED:
            found.reasons.append("file")
            found.words.append(f"{name} computes what the file says, which is not what the model computes")
            return
        defined = f"from the file's inputs on, {name} computes what ONNX defines"
        found.problem = f"{defined}; it deviates only while all tensors are watched"

    def _try(self, trial: Trial, cut: Cut, found: Diagnosis) -> None:
        changed = cut.subject.changed(trial.change)
        runtime = self.runtime.in_float32() if trial.how == "sets" else self.runtime
        if changed is None or runtime is None:
            return
        found.tried.append(trial.name)
        try:
            gap = self._gap(cut, cut.subject if trial.how == "emulates" else changed, changed, runtime)
        except VerifyError:  # a change that a runtime refuses tells nothing
            return
        if gap <= _ALLOWED:
            found.reasons.append(trial.name)
            found.words.append(trial.words)

    def _gap(self, cut: Cut, there: Subject, here: Subject, runtime: Runtime | None = None) -> int:
        """The largest difference between a runtime's results for one model and the reference results of another."""
        ours, theirs = (
            each.open(subject.file(self.file.path))(cut.feeds)[self.tensor].astype(np.int64)
            for each, subject in ((self.book, here), (runtime or self.runtime, there))
        )
        return int(np.abs(ours - theirs).max(initial=0))

    def _watched(self, runtime: Runtime, names: list[str]) -> Mapping[str, np.ndarray]:
        inputs = {n: self.feeds[n] for n in names if n in self.feeds}
        inner = [n for n in names if n not in inputs]
        seen = runtime.open(self.file.watching(inner))(self.feeds) if inner else {}
        return {n: inputs[n] if n in inputs else seen[n] for n in names}
