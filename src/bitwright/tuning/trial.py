"""A trial: a model prepared by a recipe, calibrated on the example inputs, written, and ready to be timed.

The time of a file does not depend on its ranges, so the example inputs are enough data.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bitwright.backends import Backend
from bitwright.bit_search.damage import Damage
from bitwright.correction import calibrate
from bitwright.exporting import ExportedFile, LoadedFile, export
from bitwright.exporting.formats.base import format_of
from bitwright.preparation import ledger_of
from bitwright.preparation.pipeline import prepare_resolved
from bitwright.quantizer import quantizers
from bitwright.recipe import Recipe
from bitwright.tuning.result import LeftFloat
from bitwright.verification.feeds import feeds_of


@dataclass(frozen=True)
class Source:
    """The float model and how it is prepared; files go to ``folder``."""

    model: nn.Module
    example: Any
    backend: Backend
    concrete_args: Mapping[str, Any] | None
    folder: Path

    def trial(self, recipe: Recipe, left: Iterable[LeftFloat] = ()) -> "Trial | None":
        """Prepare, calibrate and export; None if the recipe leaves nothing to quantize."""
        model = prepare_resolved(self.model, self.example, recipe, self.backend, self.concrete_args)
        if not quantizers(model):
            return None
        with _without_warnings():
            calibrate(model, [self.example], correct=False, progress=False)
            written = export(model, self.folder / f"{len(list(self.folder.iterdir()))}.onnx")
        return Trial(model, recipe, written, tuple(left))


class Trial:
    """One recipe, what it leaves float for speed, and its file."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, written: ExportedFile, left: tuple[LeftFloat, ...] = ()
    ) -> None:
        self.model, self.recipe, self.written, self.left = model, recipe, written, left
        self.file: LoadedFile = format_of(written.path).read(written.path)
        self.ledger = ledger_of(model)

    @cached_property
    def twin(self) -> LoadedFile:
        """The same network in float."""
        return self.file.float_twin()

    @cached_property
    def feeds(self) -> dict[str, np.ndarray]:
        """The example inputs as the file takes them."""
        return feeds_of(self.model, self.file, self.ledger.example)

    def decibels(self) -> float:
        """Signal over noise of the results on the example inputs."""
        measured = Damage(self.model, [self.batch], "sqnr")
        return -measured.of(measured.active)

    @property
    def batch(self) -> Any:  # noqa: ANN401
        """The example inputs as calibrate and verify take them."""
        example = self.ledger.example
        return example.kwargs if example.kwargs and not example.args else example.args


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings about a trial; the model prepared by its recipe repeats them."""
    log = logging.getLogger("bitwright")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
