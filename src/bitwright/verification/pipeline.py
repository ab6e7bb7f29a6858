"""verify: run the file where it will run, compare it with the simulation, count what runs in integers, time it."""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.backends import Backend
from bitwright.calibration import as_batches, as_inputs
from bitwright.errors import ConfigError, VerifyError
from bitwright.exporting import ExportedTensor, ExportRecord, LoadedFile
from bitwright.exporting.deploy import float_twin
from bitwright.exporting.formats.base import format_of
from bitwright.exporting.record import last_written
from bitwright.graph import Inputs
from bitwright.modes import ForkableLock, eval_mode
from bitwright.preparation import Ledger, ledger_of
from bitwright.progress import track
from bitwright.quantizer import quantizers
from bitwright.verification.changes import add_changes
from bitwright.verification.constraints import View, constraints_of, violations_of
from bitwright.verification.coverage import add_coverage
from bitwright.verification.defaults import add_defaults
from bitwright.verification.feeds import as_array, doubled, feeds_of
from bitwright.verification.hardware import hardware_notes
from bitwright.verification.identity import check_identity
from bitwright.verification.isolation.bisect import where_it_dies
from bitwright.verification.isolation.child import RuntimeDied
from bitwright.verification.latency import add_float_times, measure_latency, measure_memory
from bitwright.verification.limits import DEFAULT, NO_LIMITS, Limits
from bitwright.verification.outputs import OutputTally, as_tensor, leaves, simulate
from bitwright.verification.precision import in_files_precision
from bitwright.verification.proof import Proof, RuntimeProof, TensorCheck
from bitwright.verification.runtimes.base import RUNTIMES, Runtime
from bitwright.verification.tensors import TensorTally
from bitwright.verification.watching import Watcher

MOST_BATCHES = 8
_LONGEST = 1e9  # seconds that sockets can wait
_one_at_a_time = ForkableLock()  # verifying changes the mode of a model, and what its quantizers return
_FLOAT_FILE = "the file holds the float model (quantized=False): nothing in it is quantized"

_STANDS_IN = (
    "nothing here executes files for {0}: all quantized tensors and outputs were compared in onnxruntime, which ran "
    "every quantizer as a separate operator"
)
_UNPROVEN = "this leaves unproven the kernels of {} itself, and what its tools may demand beyond "


def verify(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    runtimes: Iterable[str] | None = None,
    limits: Limits | Mapping[str, float | None] | None = DEFAULT,
    latency: bool = True,
    timeout: float = 600.0,
    progress: bool | None = None,
) -> Proof:
    """Prove that an exported file does what the calibrated ``model`` simulates.

    The file must have been exported from this very model in its current state. A file of another model, a file with a
    wrong checksum and a model changed since then are refused. ``proof.changes`` names what differs from the file that
    ``export`` writes for the model.

    Args:
        model: the prepared and calibrated model that was exported.
        path: the file. If this process wrote it and it is unchanged, it need not be written again to compare.
        batches: inputs as for ``calibrate``; at most 8 of them are used. If all have one batch size, and the file takes
            others, the first is also run twice as large.
        runtimes: where to run the file. By default where the backend's target runs; the other runtimes that the backend
            names are tried too, and what they miss becomes a note. If no runtime here executes files for the target,
            ``reference`` proves the values, and a note says that the target's own kernels are not proven.
        limits: the limits for ``proof.ok``; those missed are listed in ``proof.missed``. A mapping changes the default
            limits (see :class:`Limits`); None compares without judging, and ``proof.ok`` is None.
        latency: measure the speed and the peak memory against FP32 in the same runtime.
        timeout: seconds that a runtime may take for one step, such as loading or running the file, before it counts as
            hung. onnxruntime and OpenVINO run in a child process, so a crash, too, becomes a finding of the proof.
        progress: show a progress bar; by default only on a terminal.
    """
    bounds = Limits.parse(limits)
    _check_timeout(timeout)
    if bounds is not None and bounds.speedup is not None and not latency:
        raise ConfigError("a limit on the speedup needs latency=True")
    ledger = ledger_of(model)
    source = Path(path)
    format = format_of(source, next(iter(ledger.backend.formats), "onnx"))
    file = format.read(source)
    chosen = _choose(runtimes, ledger, file)
    count = len(ledger.example.args)
    data = [as_inputs(b, count) for b in itertools.islice(as_batches(batches), MOST_BATCHES)]
    if not data:
        raise VerifyError("the data to verify with is empty: it yielded no batch")
    model, data, notes = in_files_precision(model, data)
    with _one_at_a_time.now, eval_mode(model):
        record = check_identity(model, file)
        data += doubled(model, file, data)
        twin = file.float_twin()
        proof = Proof(str(source), file.size, twin.size, limits=bounds, notes=notes)
        add_violations(proof, ledger.backend, file)
        add_changes(proof, model, file, record, last_written(path))
        for runtime in chosen:
            runtime.timeout = timeout
            asked = runtimes is not None or runtime is chosen[0]
            try:
                found = _prove_and_measure(model, file, record, runtime, data, twin if latency else None, progress)
                missed = bounds.missed_by(found) if bounds is not None else []
                if missed and not asked:
                    raise VerifyError("; ".join(missed) + (f"; {found.diagnosis}" if found.diagnosis else ""))
            except VerifyError as error:
                if asked:
                    raise
                proof.notes.append(f"not verified in {runtime.name}, which this file was not made for: {error}")
                continue
            proof.runtimes[runtime.name] = found
            if runtime.stands_in:
                proof.notes.append(_STANDS_IN.format(ledger.backend.name))
            proof.missed += missed
    return proof


def _check_timeout(seconds: float) -> None:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= _LONGEST):
        raise ConfigError(f"the timeout must be a number of seconds above 0, such as 600, not {seconds!r}")


def _prove_and_measure(
    model: nn.Module,
    file: LoadedFile,
    record: ExportRecord,
    runtime: Runtime,
    data: list[Inputs],
    twin: LoadedFile | None,
    show: bool | None,
) -> RuntimeProof:
    """Prove the file in one runtime, and measure speed and memory against its float ``twin``, if there is one."""
    feeds = feeds_of(model, file, data[0])
    try:
        proof = _prove(model, file, record, runtime, data, show)
        if twin is not None and not runtime.stands_in:
            proof.latency = measure_latency(runtime, file, twin, feeds)
            add_float_times(proof, runtime, twin, feeds)
            proof.memory = measure_memory(runtime, file, twin, feeds, proof.latency.batch)
    except RuntimeDied as error:
        return _crashed(runtime, file, feeds, error)
    return proof


def add_violations(proof: Proof, backend: Backend, file: LoadedFile) -> None:
    """Check the target's constraints, and say what remains unproven."""
    name, known, view = backend.name, constraints_of(backend), View.of(file)
    limits = proof.limits or NO_LIMITS
    if known and view is None:
        said = proof.notes if limits.violations is None else proof.missed
        said.append(f"not checked because {file.format} is not ONNX: what {name} demands of files")
    elif known and view is not None:
        proof.constraints = {c.name: c.text for c in known}
        proof.violations = list(violations_of(known, view))
        proof.missed += limits.broken_by(proof.violations)
        demands, broken = [c for c in known if not c.advice], {v.constraint for v in proof.violations if not v.advice}
        kept = f"{len(demands) - len(broken)} of the {len(demands)} constraints published for {name} are kept; "
        proof.notes.append(kept + _UNPROVEN.format(name) + "these")
    elif not backend.runtimes:
        proof.notes.append(_UNPROVEN.format(name) + "ONNX")


def run_file(
    path: str | os.PathLike[str], runtime: str = "onnxruntime", *, quantized: bool = True
) -> Callable[..., Any]:
    """Load an exported file as a function from tensors to tensors, called like the model.

    A file that was changed after Bitwright wrote it is refused. The function's results are not judged; see ``verify``.
    With ``quantized=False``, it computes the same network in FP32: without quantizers, weights dequantized.
    """
    source = Path(path)
    program = RUNTIMES.get(runtime)()
    file = format_of(source).read(source)
    file = file if quantized else file.float_twin()
    session, names = program.open(file), file.inputs

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:  # noqa: ANN401
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or sorted(given) != sorted(names):
            raise ConfigError(f"the file takes the inputs {names}; {len(args)} and {sorted(kwargs)} were given")
        results = session({k: as_array(v) for k, v in given.items()})
        if missing := [name for name in file.outputs if name not in results]:
            raise VerifyError(f"{runtime} does not return the output {missing[0]}")
        tensors = tuple(as_tensor(results[name]) for name in file.outputs)
        return tensors[0] if len(tensors) == 1 else tensors

    return call


def _choose(names: Iterable[str] | None, ledger: Ledger, file: LoadedFile) -> list[Runtime]:
    if names is not None:
        return _named(list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names])
    able = [n for n in RUNTIMES if file.format in RUNTIMES.get(n).formats]
    known = [n for n in ledger.backend.runtimes if n in able] if not file.stands_in else []
    known = known or (["reference"] if "reference" in able or not able else able)
    return [RUNTIMES.get(n)() for n in known if RUNTIMES.get(n).available()] or [RUNTIMES.get(known[0])()]


def _named(names: list[str]) -> list[Runtime]:
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError("name at least one runtime to verify in, or let the backend choose")
    return [RUNTIMES.get(name)() for name in names]


def _prove(
    model: nn.Module, file: LoadedFile, record: ExportRecord, runtime: Runtime, data: list[Inputs], show: bool | None
) -> RuntimeProof:
    """Prove the file in one runtime."""
    proof = RuntimeProof(runtime.name, runtime.version)
    simulation = model if record.quantized else float_twin(model).model
    weights = {t.quantizer for t in record.tensors if t.kind == "weight"}
    tensors, outputs = TensorTally(record.tensors, file.constant), OutputTally(file.outputs, weights)
    session, watch, executed = runtime.open(file), None, None
    deviating: tuple[ExportedTensor, dict[str, np.ndarray]] | None = None
    for inputs in track(data, f"verifying in {runtime.name}", show=show):
        feeds = feeds_of(model, file, inputs)
        results = session(feeds)
        if executed is None:
            executed = runtime.profile(file, feeds)
            add_coverage(proof, runtime, executed, file, ledger_of(model), feeds)
            add_defaults(proof, runtime, file, feeds, results)
        following = None
        if record.quantized:
            watch = watch or Watcher(runtime, file, feeds, results, executed).watch(tensors.watched)
            with tensors.follow(model, watch(feeds), watch.fused, watch.untouched):
                following = simulate(model, inputs)
            first = tensors.deviating()
            deviating = (first, feeds) if first is not None and (not deviating or deviating[0] != first) else deviating
        outputs.add(simulation, inputs, results, following)
    proof.outputs, proof.tensors = outputs.checks(), tensors.checks() if record.quantized else _all_float(model)
    proof.notes += [*hardware_notes(file, record), *_lost_results(simulate(simulation, data[0]))]
    if deviating is not None:
        from bitwright.verification.diagnosis import diagnose

        proof.diagnosis = diagnose(runtime, file, deviating[1], deviating[0].name, deviating[0].tensor)
    return proof


def _crashed(runtime: Runtime, file: LoadedFile, feeds: Mapping[str, np.ndarray], error: RuntimeDied) -> RuntimeProof:
    """What is known about a runtime that crashed or hung: how, and which operator triggers it."""
    where = where_it_dies(runtime, file, feeds)
    how = str(error).removeprefix(f"{runtime.name} ")
    begins = f"; it begins with {where}" if where else ""
    return RuntimeProof(runtime.name, runtime.version, dict(runtime.settings), crash=how + begins)


def _all_float(model: nn.Module) -> list[TensorCheck]:
    placed = {name: q for name, q in quantizers(model).items() if q.quantizes}
    return [TensorCheck(q.label or name, reason=_FLOAT_FILE) for name, q in placed.items()]


def _lost_results(result: object) -> list[str]:
    """The parts of a model's result that are missing from the file because they are not tensors."""
    lost = [repr(leaf)[:40] for leaf in leaves(result) if leaf is not None and not isinstance(leaf, torch.Tensor)]
    return [f"the file returns only tensors; of what the model returns, it lacks {', '.join(lost)}"] if lost else []
