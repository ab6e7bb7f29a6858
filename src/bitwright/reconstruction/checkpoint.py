"""Checkpoints: each finished unit is a file, so that a killed job continues where it was."""

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from bitwright.checkpoints import Checkpoint, Saved, digest_of
from bitwright.distributed import Ranks, rank
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.result import UnitResult
from bitwright.reconstruction.settings import Settings


class UnitCheckpoints:
    """A folder with one checkpoint per unit, all of the same model, settings and data; rank 0 writes and reads."""

    def __init__(
        self, folder: str | Path, model: nn.Module, settings: Settings, inputs: Iterable[object], ranks: Ranks
    ) -> None:
        self._folder, self._ranks = folder, ranks
        data = ranks.gather(digest_of(list(inputs)).encode())
        self._identity = {
            "model": digest_of([str(getattr(model, "code", type(model).__name__)), dict(model.state_dict())]),
            "choice of settings": digest_of(repr(settings)),
            "data set": data[0].decode() if len(data) == 1 else digest_of(data),
        }
        self._of(0)  # raises now if there cannot be such a folder

    def save(self, number: int, result: UnitResult, weights: list[LearnedWeight], scales: list[LearnedScale]) -> None:
        """Store a unit, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        if result.kept:
            tensors |= {f"weight.{i}": w.ups() for i, w in enumerate(weights)}
            tensors |= {f"stretch.{i}": w.method.stretch for i, w in enumerate(weights) if w.method.stretch is not None}
            tensors |= {f"scale.{i}": s.quantizer.qparams()[0].clone() for i, s in enumerate(scales)}
        with self._ranks.together():
            if rank() == 0:
                self._of(number).write(tensors, result.to_dict())

    def load(self, number: int, weights: list[LearnedWeight], scales: list[LearnedScale]) -> UnitResult | None:
        """Restore what a unit has learned, if it is stored."""
        saved = self._read(number)
        if saved is None:
            return None
        with self._of(number).blamed():
            result = UnitResult.from_dict(saved.data)
            if result.kept:
                _put(saved.tensors, weights, scales)
        return result

    def _read(self, number: int) -> Saved | None:
        """What the first process has stored for a unit."""
        found = None
        with self._ranks.together():
            if rank() == 0:
                found = self._of(number).read()
        data = self._ranks.gather(b"" if found is None else json.dumps(found.data).encode())[0]
        if not data:
            return None
        return Saved(self._ranks.gather_tensors({} if found is None else found.tensors)[0], json.loads(data))

    def _of(self, number: int) -> Checkpoint:
        return Checkpoint(self._folder, f"unit-{number:04d}", self._identity)


def _put(learned: dict[str, Tensor], weights: list[LearnedWeight], scales: list[LearnedScale]) -> None:
    """Give weights and scales what they had learned."""
    for i, weight in enumerate(weights):
        weight.round_by(learned[f"weight.{i}"].view(weight.weight.shape))
        if f"stretch.{i}" in learned:
            weight.stretch_by(learned[f"stretch.{i}"])
    for i, scale in enumerate(scales):
        before, zero_point = scale.quantizer.qparams()
        scale.quantizer.set_qparams(learned[f"scale.{i}"].view(before.shape), zero_point)
