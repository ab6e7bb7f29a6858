"""calibrate: find the ranges of a prepared model, then correct what they leave behind as its recipe says."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from bitwright.calibration import as_batches, fix_ranges
from bitwright.correction.reference import undo_corrections
from bitwright.correction.running import samples_in
from bitwright.correction.steps import correct_by_recipe, say_what_is_left
from bitwright.distributed import TIMEOUT, world_size
from bitwright.preparation import ledger_of

SAMPLES = 512  # that corrections see; more change little


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    correct: bool = True,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    uneven: bool = False,
    timeout: float = TIMEOUT,
) -> nn.Module:
    """Run ``batches`` through a prepared model and quantize it.

    Then the corrections that the recipe lists run on the first 512 samples, as by ``bw.correct``; presets below 8 bits
    list some. ``ledger_of(model).corrected`` says what they did, and ``correct: []`` in the recipe turns them off.

    Under ``torchrun`` each rank passes its own share of the data, and all get the ranges of the whole, as if one
    process had seen it in rank order. A rank that fails, or has no data, is an error on all. Corrections need the same
    data on all ranks, so they are left to ``bw.correct``.

    Args:
        model: what ``prepare`` returned.
        batches: any iterable of tensors, tuples of arguments or dicts of keyword arguments. A tuple may be longer than
            the model's inputs, like (images, labels) from a data loader; the rest is dropped. A single tensor or dict
            is one batch.
        correct: run the corrections of the recipe.
        progress: show a progress bar; by default only on a terminal.
        checkpoint: a folder for the progress, written once a minute, at the end, when the data raises an error, and on
            SIGINT or SIGTERM. The same call continues from there: it skips the batches that were seen, which must be
            the same in the same order. A checkpoint of another model, recipe or data set is refused.
        uneven: allow ranks to have different numbers of batches.
        timeout: how long a rank waits for the others, in seconds.

    Returns:
        The same model, now quantizing. Quantizers on which ``disable()`` was called do not change; those whose range is
        fixed, or that have no observer and use the range of each tensor, keep doing so. Layers that no batch reached,
        such as an expert without tokens or a branch not taken, stay float: their quantizers are disabled, and a warning
        in the log and a note in the ledger name them.
    """
    wanted = correct and bool(ledger_of(model).recipe.correct) and world_size() == 1
    if wanted:
        undo_corrections(model)  # of an earlier calibration; these follow again
    data = _Kept(batches, SAMPLES if wanted else 0)
    fix_ranges(model, data, progress=progress, checkpoint=checkpoint, uneven=uneven, timeout=timeout)
    if wanted:
        correct_by_recipe(model, data.first, progress)
    else:
        say_what_is_left(model)
    return model


class _Kept:
    """Batches that are read once, and the first of them."""

    def __init__(self, batches: Iterable[Any], samples: int) -> None:
        self.batches, self.left = as_batches(batches), samples
        self.first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.left > 0:
                self.first.append(batch)
                self.left -= samples_in(batch)
            yield batch
