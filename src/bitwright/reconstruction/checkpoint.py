"""Checkpoints: each finished unit is a file, so that a job that was killed goes on where it was."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from bitwright.checkpoints import Checkpoint, digest_of
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.result import UnitResult
from bitwright.reconstruction.settings import Settings


class UnitCheckpoints:
    """A folder with one checkpoint per unit, all of the same model, settings and data.

    Args:
        folder: where the files are, or will be.
        model: the model as it is before any unit is learned.
        settings: how units are learned.
        inputs: the data.
    """

    def __init__(self, folder: str | Path, model: nn.Module, settings: Settings, inputs: Iterable[object]) -> None:
        self._folder = folder
        self._identity = {
            "model": digest_of([str(getattr(model, "code", type(model).__name__)), dict(model.state_dict())]),
            "choice of settings": digest_of(repr(settings)),
            "data set": digest_of(list(inputs)),
        }
        self._of(0)  # says now if there cannot be such a folder

    def save(self, number: int, result: UnitResult, weights: list[LearnedWeight], scales: list[LearnedScale]) -> None:
        """Store a unit, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        if result.kept:
            tensors |= {f"weight.{i}": w.ups() for i, w in enumerate(weights)}
            tensors |= {f"stretch.{i}": w.method.stretch for i, w in enumerate(weights) if w.method.stretch is not None}
            tensors |= {f"scale.{i}": s.quantizer.qparams()[0].clone() for i, s in enumerate(scales)}
        self._of(number).write(tensors, result.to_dict())

    def load(self, number: int, weights: list[LearnedWeight], scales: list[LearnedScale]) -> UnitResult | None:
        """Give a unit what it has learned, if it is stored."""
        saved = self._of(number).read()
        if saved is None:
            return None
        result = UnitResult.from_dict(saved.data)
        if result.kept:
            for i, weight in enumerate(weights):
                weight.round_by(saved.tensors[f"weight.{i}"])
                if f"stretch.{i}" in saved.tensors:
                    weight.stretch_by(saved.tensors[f"stretch.{i}"])
            for i, scale in enumerate(scales):
                scale.quantizer.set_qparams(saved.tensors[f"scale.{i}"], scale.quantizer.qparams()[1])
        return result

    def _of(self, number: int) -> Checkpoint:
        return Checkpoint(self._folder, f"unit-{number:04d}", self._identity)
