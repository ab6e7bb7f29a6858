"""tune_speed: leave operators float that are slower in integers, as measured on files in a runtime."""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bitwright.backends import Backend
from bitwright.distributed import world_size
from bitwright.errors import BitwrightError, ConfigError
from bitwright.exporting import LoadedFile
from bitwright.files import scratch_folder
from bitwright.graph import read_switches
from bitwright.preparation import resolve_recipe
from bitwright.recipe import Recipe
from bitwright.tuning.losses import Cost, costs_of, losers, without
from bitwright.tuning.result import SpeedTuning
from bitwright.tuning.trial import Source, Trial
from bitwright.verification.pipeline import verify
from bitwright.verification.runtimes.base import RUNTIMES, Runtime

# How strict each round is: an operator loses if it takes this many times longer in integers, and this many µs more.
_ROUNDS = ((1.1, 1.0), (1.1, 1.0), (1.0, 0.0), (0.9, 0.0))
_RACES = 5  # the median counts; in each race, files run in turn
_FASTER = 1.02  # a file must be this many times faster to be kept
_MOST_LOSS = 3.0  # dB that integer attention may cost
ATTENTION, DECOMPOSE = "scaled_dot_product_attention", "decompose_attention"


def tune_speed(
    model: nn.Module,
    example_inputs: Any,  # noqa: ANN401
    backend: str | Path | Backend | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    runtime: str | None = None,
) -> SpeedTuning:
    """Find what to leave float to make the file as fast as possible on this machine, on one thread.

    The model is prepared, calibrated on the example inputs and exported, and its operators are timed against those of
    the float network. Those that lose are left float, and the file is written and timed again, up to a few times. If
    the model has attention that stays float, its products are also tried in integers. A file is kept only if it is
    faster as a whole and verified. Rules of the recipe that set something are obeyed.

    Args:
        model: the float model; it is left untouched.
        example_inputs: as for ``prepare``; files are timed on them, so use the batch size that you will deploy.
        backend: as for ``prepare``.
        recipe: as for ``prepare``.
        concrete_args: as for ``prepare``.
        runtime: where to time; by default where the backend's target runs.

    Returns:
        The recipe to prepare with, what it leaves float, and the times before and after.
    """
    resolved, target = resolve_recipe(backend, recipe)
    return tune_resolved(model, example_inputs, resolved, target, concrete_args, runtime)


def tune_resolved(
    model: nn.Module,
    example_inputs: object,
    recipe: Recipe,
    backend: Backend,
    concrete_args: Mapping[str, Any] | None = None,
    runtime: str | None = None,
) -> SpeedTuning:
    """Tune a recipe that says everything."""
    if world_size() > 1:
        raise ConfigError(
            "tuning for speed times files in one process: run bw.tune_speed there first, and prepare with its recipe"
        )
    program = runtime_for(backend, runtime)
    with scratch_folder(tempfile.gettempdir()) as folder:
        return _Search(Source(model, example_inputs, backend, concrete_args, folder), program).run(recipe)


def runtime_for(backend: Backend, name: str | None = None) -> Runtime:
    """The runtime that times the files; raises if there is none."""
    known = [n for n in ([name] if name is not None else backend.runtimes) if not RUNTIMES.get(n).stands_in]
    usable = [n for n in known if RUNTIMES.get(n).available()]
    if not known:
        raise ConfigError(
            f"tuning for speed needs a runtime that executes files here, and nothing does for {backend.name}: "
            "name one (tune_speed(…, runtime='onnxruntime')) if it represents your target well enough"
        )
    return RUNTIMES.get((usable or known)[0])()


class _Search:
    """Trials from the given recipe, and the best of them so far."""

    def __init__(self, source: Source, runtime: Runtime) -> None:
        self._source, self._runtime, self._notes = source, runtime, list[str]()
        self._feeds: dict[str, np.ndarray] = {}
        self._beaten: dict[Trial, Trial] = {}  # what each winner of a race was faster than

    def run(self, recipe: Recipe) -> SpeedTuning:
        """Search, prove the winner, and time it against the first file and against float."""
        first = self._source.trial(recipe)
        if first is None:
            raise ConfigError("tuning for speed found nothing to quantize; `bitwright inspect` says why")
        self._feeds = first.feeds
        if self._runtime.name != (target := first.ledger.backend.name):
            self._notes.append(f"timed in {self._runtime.name}, which is not {target}: its times may differ")
        best = self._rounds(first)
        if (other := self._with_attention(first)) is not None:
            best = self._faster(best, self._rounds(other))
        best = self._proven(best, first)
        plain, before, after = self._times([first.twin, first.file, best.file])
        if best is first:
            after = before
        if min(before, after) > plain * _FASTER:
            self._notes.append(
                f"no choice of layers makes this file as fast as float in {self._runtime.name}: deploy the float model "
                "here, or give larger inputs to tune with if you will run larger ones"
            )
        decomposed = best.recipe.schedules.get(DECOMPOSE) != recipe.schedules.get(DECOMPOSE)
        times = (1e3 * plain, 1e3 * before, 1e3 * after)
        return SpeedTuning(best.recipe, self._runtime.name, *times, best.left, decomposed, tuple(self._notes))

    def _rounds(self, start: Trial) -> Trial:
        """Repeatedly leave losing operators float; the fastest of all files wins."""
        best = latest = start
        costs = self._costs(start)
        for times, least in _ROUNDS:
            lost = losers(costs, times, least)
            if not lost or len(lost) >= len(costs):
                continue
            trial = self._source.trial(without(latest.recipe, lost), (*latest.left, *lost))
            if trial is not None:
                best, latest, costs = self._faster(best, trial), trial, self._costs(trial)
        return best

    def _costs(self, trial: Trial) -> dict[str, Cost]:
        return costs_of(self._runtime, trial.file, trial.twin, trial.ledger, trial.feeds)

    def _with_attention(self, first: Trial) -> Trial | None:
        """The same recipe with attention in integers, if it is float by default and integers cost little."""
        attends = any(e.operator == ATTENTION and not e.rule for e in first.ledger.entries)
        if not attends or DECOMPOSE in read_switches(first.recipe.schedules):
            return None
        schedules = {**first.recipe.schedules, DECOMPOSE: True}
        trial = self._source.trial(first.recipe.model_copy(update={"schedules": schedules}))
        if trial is None:
            return None
        lost = first.decibels() - trial.decibels()
        if lost > _MOST_LOSS:
            self._notes.append(f"attention stays float: in integers, it costs {lost:.1f} dB on the example inputs")
            return None
        return trial

    def _faster(self, best: Trial, trial: Trial) -> Trial:
        """The faster of two files, or the first unless the second is clearly faster."""
        if best is trial:
            return best
        old, new = self._times([best.file, trial.file])
        if new * _FASTER >= old:
            return best
        self._beaten[trial] = best
        return trial

    def _proven(self, best: Trial, first: Trial) -> Trial:
        """The fastest whose file does what the simulation does, or else the first file."""
        while best is not first and (problem := self._problem(best)):
            self._notes.append(f"a faster file was not kept because it was not verified: {problem}")
            best = self._beaten.get(best, first)
        return best

    def _problem(self, trial: Trial) -> str:
        """What verify misses in a file, or nothing."""
        try:
            proof = verify(
                trial.model, trial.written, [trial.batch], runtimes=[self._runtime.name], latency=False, progress=False
            )
        except BitwrightError as error:
            return str(error)
        return "; ".join(proof.missed)

    def _times(self, files: list[LoadedFile]) -> list[float]:
        """Seconds of each file, the median of several races."""
        races = [self._runtime.race(files, self._feeds) for _ in range(_RACES)]
        return [statistics.median(column) for column in zip(*races, strict=True)]
