"""analyze: run a calibrated model in float and quantized, and compare the two operator by operator."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from bitwright.analysis.rows import Row, rows_of
from bitwright.analysis.stats import Analysis
from bitwright.analysis.watch import Record, unchanged, watched
from bitwright.calibration import as_batches, as_inputs
from bitwright.correction.reference import in_float
from bitwright.errors import CalibrationError
from bitwright.graph import Inputs
from bitwright.modes import random_numbers_kept
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import Mode, TensorQuantizer, quantizers


def outline(model: nn.Module) -> Analysis:
    """What is known about a prepared model without running it: verdicts, specs and, once calibrated, ranges."""
    return Analysis(row.stats for row in rows_of(model))


def analyze(model: nn.Module, batches: Iterable[Any], *, progress: bool | None = None) -> Analysis:
    """Run a calibrated model in float and quantized, and compare the two operator by operator.

    Quantizers that are off stay off. The float model is that before corrections. One batch's activations are held at a
    time, and O(bins) of all others.

    Args:
        model: a calibrated model; it is unchanged afterwards.
        batches: data as for ``calibrate``.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        A list that prints as a table: first the quantized inputs and constants of graphs, then every operator of the
        ledger in its order.
    """
    count = len(ledger_of(model).example.args)
    rows, found = rows_of(model), list(quantizers(model).values())
    active = [q for q in found if q.quantizes]
    if not active:
        raise CalibrationError("no quantizer of the model is quantizing: calibrate it before analyzing it")
    record, number = Record(), 0
    with torch.no_grad(), random_numbers_kept(), unchanged(model), watched(model, rows, record):
        _measure_weights(model, rows)
        for number, batch in enumerate(track(as_batches(batches), "analyzing", show=progress), start=1):
            inputs, state = as_inputs(batch, count), torch.get_rng_state()
            record.clear()
            for record.quantized in (False, True):
                _switch(found, active if record.quantized else ())
                torch.set_rng_state(state)
                with nullcontext() if record.quantized else in_float(model):
                    _run(model, inputs, number)
    if not number:
        raise CalibrationError("the data to analyze with is empty: it yielded no batch")
    return Analysis(row.result() for row in rows)


def _measure_weights(model: nn.Module, rows: list[Row]) -> None:
    with in_float(model):
        weights = [row.weight() for row in rows]
    for row, weight in zip(rows, weights, strict=True):
        row.measure_weight(weight)


def _switch(every: Iterable[TensorQuantizer], on: Iterable[TensorQuantizer]) -> None:
    for quantizer in every:
        quantizer.mode = Mode.OFF
    for quantizer in on:
        quantizer.mode = Mode.QUANTIZE


def _run(model: nn.Module, inputs: Inputs, number: int) -> None:
    try:
        inputs.run(model)
    except Exception as error:
        raise CalibrationError(
            f"the model refuses batch {number} {inputs} while being analyzed: {type(error).__name__}: {error}"
        ) from error
