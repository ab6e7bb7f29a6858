"""correct: run the correctors that a recipe lists, one after the other; calibration does so, too."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from bitwright.calibration import add_note, as_batches
from bitwright.correction.analytic_bias import correct_bias_analytically
from bitwright.correction.bias import correct_bias
from bitwright.correction.equalization import equalize
from bitwright.correction.gptq import gptq
from bitwright.correction.norms import reestimate_norms
from bitwright.correction.outcome import Correction, Corrections
from bitwright.correction.reference import undo_corrections
from bitwright.correction.smoothing import smooth
from bitwright.correction.weight_ranges import fit_weight_ranges
from bitwright.errors import CalibrationError, ConfigError, UnknownNameError, suggest
from bitwright.preparation import ledger_of

USUAL = ("gptq", "norms", "bias")
STEPS: dict[str, Callable[..., Correction]] = {
    "smooth": smooth,
    "equalize": equalize,
    "weight_ranges": fit_weight_ranges,
    "gptq": gptq,
    "norms": reestimate_norms,
    "analytic_bias": lambda model, _batches, progress=None: correct_bias_analytically(model),
    "bias": correct_bias,
}


def correct(
    model: nn.Module, batches: Iterable[Any], steps: str | Sequence[str] | None = None, *, progress: bool | None = None
) -> Corrections:
    """Recover accuracy of a prepared and calibrated model, in seconds and without training.

    ``bw.calibrate`` has already run the steps of the recipe, unless told otherwise; this runs others, or more data.

    ::

        qmodel = bw.prepare(net, images, recipe="W4A8")
        bw.calibrate(qmodel, batches, correct=False)
        bw.correct(qmodel, batches, ["gptq", "norms", "bias"])

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``, to be read several times; a few hundred images.
        steps: what to do, in this order, from ``"smooth"``, ``"equalize"``, ``"weight_ranges"``, ``"gptq"``,
            ``"norms"``, ``"analytic_bias"`` and ``"bias"``; by default the recipe's ``correct``, or else GPTQ, norms
            and bias.
        progress: show progress bars; by default only on a terminal.

    Returns:
        What each step did.
    """
    steps = (
        (ledger_of(model).recipe.correct or USUAL)
        if steps is None
        else (steps,)
        if isinstance(steps, str)
        else tuple(steps)
    )
    for step in steps:
        if step not in STEPS:
            raise UnknownNameError(f"unknown corrector {step!r}{suggest(str(step), STEPS)}")
    data = as_batches(batches)
    data = data if len(steps) < 2 or isinstance(data, Sequence) else list(data)
    done = Corrections(STEPS[step](model, data, progress=progress) for step in steps)
    _note(model, done)
    return done


def correct_by_recipe(model: nn.Module, batches: Sequence[Any], progress: bool | None) -> None:
    """Run the steps of the recipe; those that do not fit the model or the data are noted and left out."""
    done = []
    for step in ledger_of(model).recipe.correct:
        try:
            done.append(STEPS[step](model, batches, progress=progress))
        except (CalibrationError, ConfigError) as error:
            add_note(model, f"the correction {step!r} of the recipe was left out: {error}")
    _note(model, done)


def say_what_is_left(model: nn.Module) -> None:
    """Log, and note in the ledger, that the corrections of the recipe are yet to be run."""
    note = _uncorrected(model)
    if note is not None:
        add_note(model, note)


def undo_for_other_bits(model: nn.Module) -> None:
    """Undo corrections, because the bits that they were made for are about to change."""
    if undo_corrections(model):
        ledger_of(model).corrected.clear()
        add_note(model, "the corrections were undone, because bits change: bw.correct(model, batches) makes them again")


def _note(model: nn.Module, done: list[Correction]) -> None:
    ledger = ledger_of(model)
    ledger.notes = [note for note in ledger.notes if note != _uncorrected(model)]
    ledger.corrected += [str(each).splitlines()[0] for each in done]


def _uncorrected(model: nn.Module) -> str | None:
    steps = ledger_of(model).recipe.correct
    if not steps:
        return None
    return f"the recipe asks for corrections ({', '.join(steps)}): bw.correct(model, batches) applies them"
