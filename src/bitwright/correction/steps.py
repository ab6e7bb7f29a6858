"""correct: run the correctors that a recipe lists, one after the other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from bitwright.calibration import as_batches, uncorrected_note
from bitwright.correction.analytic_bias import correct_bias_analytically
from bitwright.correction.bias import correct_bias
from bitwright.correction.equalization import equalize
from bitwright.correction.gptq import gptq
from bitwright.correction.norms import reestimate_norms
from bitwright.correction.outcome import Correction, Corrections
from bitwright.correction.smoothing import smooth
from bitwright.correction.weight_ranges import fit_weight_ranges
from bitwright.errors import UnknownNameError, suggest
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

    ::

        qmodel = bw.prepare(net, images, recipe={"preset": "W4A8", "correct": ["gptq", "norms", "bias"]})
        bw.calibrate(qmodel, batches)
        bw.correct(qmodel, batches)

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
    ledger = ledger_of(model)
    ledger.notes = [note for note in ledger.notes if note != uncorrected_note(model)]
    return done
