"""One family from the float model to proven, timed files; runs in a process of its own, which may crash."""

import argparse
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

import bitwright as bw
from benchmarks.zoo.families import FAMILIES, Batch, Family
from benchmarks.zoo.libraries import declare_torchvision_operators
from benchmarks.zoo.meter import Meter
from benchmarks.zoo.row import DONE, Row
from benchmarks.zoo.weights import call, make_sane
from bitwright.errors import CalibrationError
from bitwright.exporting.formats import FORMATS
from bitwright.verification import RUNTIMES, Proof

T = TypeVar("T")
FLOAT_EXPORT = "torch's export"
_RUNS, _WARM_UP, _MOST_SECONDS = 30, 3, 12.0
_MOST_LINES = 60


class Measuring:
    """Takes a family through all steps, writing its row before and after each."""

    def __init__(self, family: Family, folder: Path, place: Path) -> None:
        self.family, self.folder, self.place = family, folder, place
        self.meter = Meter()
        torch.manual_seed(0)
        self.model = family.build().eval()
        make_sane(self.model, family.inputs(8))
        self.example, self.sample = family.inputs(2), family.inputs(1)
        self.calibration, self.fresh = [family.inputs(4), family.inputs(4)], family.inputs(2)
        self.float_file = place / "float.onnx"
        self.float_row = Row(family.name, family.library, family.kind, "")

    def run(self, backend: str) -> None:
        """Measure one backend; failures are noted in its row."""
        row = Row(self.family.name, self.family.library, self.family.kind, backend)
        row.steps.update(self.float_row.steps)
        row.notes += self.float_row.notes
        with _logged_to(row):
            try:
                self._steps(row, backend)
                row.step = DONE
            except Exception as error:
                row.error, row.trace = describe(error), traceback.format_exc()
        row.write(self.folder)

    def export_float(self) -> None:
        """Let torch write the float model: the yardstick for our export, and for the speed of our file."""
        try:
            _, self.float_row.steps[FLOAT_EXPORT] = self.meter.measure(self._export_float)
        except Exception as raised:
            error: BaseException = raised
            while error.__cause__ is not None:  # torch wraps what went wrong in advice
                error = error.__cause__
            self.float_row.notes.append(f"torch cannot export the float model: {describe(error)}")

    def _steps(self, row: Row, backend: str) -> None:
        file = self.place / f"{backend}.onnx"
        qmodel = self._step(row, "prepare", lambda: bw.prepare(self.model, self.example, backend=backend))
        row.islands = dict(bw.ledger_of(qmodel).islands)
        self._step(row, "calibrate", lambda: self._calibrate(row, qmodel))
        row.sqnr = _sqnr(self.model, qmodel, self.fresh)
        self._step(row, "export", lambda: bw.export(qmodel, file))
        proof = self._step(
            row,
            "verify",
            lambda: bw.verify(qmodel, file, [self.fresh], runtimes=[backend], latency=False, progress=False),
        )
        _note_proof(row, proof, backend)
        self._step(row, "time", lambda: self._time(row, file, backend))

    def _calibrate(self, row: Row, qmodel: nn.Module) -> None:
        """Calibrate on batches of another size than the example's, or else of its size."""
        try:
            bw.calibrate(qmodel, self.calibration, progress=False)
        except CalibrationError as error:
            row.notes.append(describe(error))
            bw.calibrate(qmodel, [self.example, self.family.inputs(2)], progress=False)

    def _step(self, row: Row, name: str, work: Callable[[], T]) -> T:
        row.step = name
        row.write(self.folder)
        result, row.steps[name] = self.meter.measure(work)
        return result

    def _export_float(self) -> None:
        batch = self.example
        args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
        free = {0: torch.export.Dim("batch")}
        shapes = dict.fromkeys(batch, free) if isinstance(batch, dict) else (free,)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = _export_quietly(self.model, args, kwargs, shapes)
        program.save(str(self.float_file))

    def _time(self, row: Row, file: Path, backend: str) -> None:
        """Time the file and torch's float file in turns, one thread, one sample if the files take one.

        What counts is computing time: on a busy machine, elapsed time makes whatever takes longer look slower still.
        """
        if not self.float_file.exists():
            return
        runtime = RUNTIMES.get(backend)()
        files = [FORMATS.get("onnx")().read(path) for path in (file, self.float_file)]
        sessions = [runtime.session(read, 1) for read in files]  # in this process, whose computing time counts
        for batch in (self.sample, self.example):
            feeds = [_feeds(read.inputs, batch) for read in files]
            try:
                for session, feed in zip(sessions, feeds, strict=True):
                    session(feed)
                break
            except Exception as error:
                row.notes.append(f"not timed with this batch: {describe(error)}")
        else:
            return
        best = [float("inf")] * 2
        start = time.perf_counter()
        for turn in range(_WARM_UP + _RUNS):
            for i, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
                before = time.process_time()
                session(feed)
                if turn >= _WARM_UP:
                    best[i] = min(best[i], (time.process_time() - before) * 1e3)
            if turn > _WARM_UP and time.perf_counter() - start > _MOST_SECONDS:
                break
        row.milliseconds, row.float_milliseconds = round(best[0], 4), round(best[1], 4)


def _export_quietly(model: nn.Module, args: tuple, kwargs: dict, shapes: object) -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(
        model, args, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, opset_version=21, verbose=False
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    return program


def _note_proof(row: Row, proof: Proof, backend: str) -> None:
    found = proof.runtimes[backend]
    row.coverage, row.equal, row.gap = found.coverage, found.equal, found.largest
    row.deviation = found.first_deviation.name if found.first_deviation else ""
    row.output = max((o.relative for o in found.outputs), default=None)
    row.proven, row.missed = proof.ok, list(proof.missed)
    row.notes += [*proof.notes, *found.notes]
    floats = [f"{o.name} ({o.kind}, as {o.runs_as}): {o.reason}" for o in found.operators if not o.integer]
    row.float_operators = floats[:_MOST_LINES]


def _sqnr(model: nn.Module, qmodel: nn.Module, batch: Batch) -> float | None:
    """How far the simulation is from the float model, over all outputs that are floating point."""
    with torch.no_grad():
        pairs = zip(floats(call(model, batch)), floats(call(qmodel, batch)), strict=False)
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape]  # a length may depend on data, or be drawn
        powers = [(float(a.double().square().sum()), float((a - b).double().square().sum())) for a, b in pairs]
    signal, noise = sum(p for p, _ in powers), sum(n for _, n in powers)
    return float(10 * np.log10(signal / noise)) if signal and noise else None


def floats(value: object) -> Iterator[torch.Tensor]:
    """The tensors of floating point in what a model returns."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from floats(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from floats(part)


def _feeds(names: list[str], batch: Batch) -> dict[str, np.ndarray]:
    values = batch if isinstance(batch, dict) else {names[0]: batch}
    return {name: values[name].numpy() for name in names}


def describe(error: BaseException) -> str:
    """Say what went wrong, and the innermost places in our code, from the first error on."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    source = str(Path(bw.__file__).parent)
    frames = [
        f for e in reversed(chain) for f in traceback.extract_tb(e.__traceback__) if f.filename.startswith(source)
    ]
    places = dict.fromkeys(f"{Path(f.filename).relative_to(source)}:{f.name}" for f in frames[::-1])
    text = " | ".join(str(error).strip().splitlines()[:3])
    return f"{type(error).__name__}: {text[:600]} [{' < '.join(list(places)[:3])}]"


@contextmanager
def _logged_to(row: Row) -> Iterator[None]:
    """Keep our warnings in the row, each once."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()[:400]
            if line not in row.notes and len(row.notes) < _MOST_LINES:
                row.notes.append(line)

    handler, logger = Handler(logging.WARNING), logging.getLogger("bitwright")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _warm_up(place: Path, backends: list[str]) -> None:
    """Import and compile whatever the first export and the first session of a process pay for."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    for backend in backends:
        qmodel = bw.calibrate(bw.prepare(net, x, backend=backend), [x], progress=False)
        file = bw.export(qmodel, place / "warm_up.onnx")
        bw.verify(qmodel, file, [x], runtimes=[backend], latency=False, progress=False)


def main() -> None:
    """Measure a family for some backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("backends", nargs="+")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    declare_torchvision_operators()
    with tempfile.TemporaryDirectory() as place:
        _warm_up(Path(place), given.backends)
        measuring = Measuring(FAMILIES[given.family], given.folder, Path(place))
        measuring.export_float()
        for backend in given.backends:
            measuring.run(backend)


if __name__ == "__main__":
    main()
