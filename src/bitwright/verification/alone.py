"""Files without their model: compare a file with its definition by ONNX, or with another file."""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import Backend, find_backend
from bitwright.calibration import as_batches, as_inputs
from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.exporting.formats.base import format_of
from bitwright.graph import Inputs
from bitwright.verification.coverage import add_coverage
from bitwright.verification.feeds import as_array
from bitwright.verification.latency import measure_latency, measure_memory
from bitwright.verification.limits import Limits
from bitwright.verification.outputs import OutputTally, as_tensor
from bitwright.verification.pipeline import MOST_BATCHES, add_violations
from bitwright.verification.proof import Proof, RuntimeProof
from bitwright.verification.runtimes.base import RUNTIMES, Runtime, Session

_ALONE = "compared with what the file says, not with the model that it was exported from"


def check_file(
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    runtimes: Iterable[str] | None = None,
    backend: str | os.PathLike[str] | Backend | None = None,
    limits: Mapping[str, float | None] | None = None,
    latency: bool = True,
) -> Proof:
    """Run a file in runtimes and compare its outputs with those that ONNX defines, operator by operator.

    It needs no model, so it cannot tell whether the file does what was simulated; ``verify`` can. A file that was
    changed after Bitwright wrote it is refused.

    Args:
        path: the file.
        batches: inputs of the file: tensors, tuples of tensors in its order, or dicts; at most 8 are used.
        runtimes: where to run it; by default in onnxruntime, or in ``reference`` for a model rebuilt from a file of
            ranges.
        backend: the file's target, whose published constraints are checked and must be kept.
        limits: limits to keep; of those in :class:`Limits`, ``output``, ``coverage``, ``coverage_multiply_adds`` and
            ``speedup`` can be measured here. Without any, nothing is judged.
        latency: measure the speed and the peak memory against FP32 in the same runtime.
    """
    file, data = _read(path, batches)
    if file.format not in RUNTIMES.get("reference").formats:
        raise VerifyError(
            f"{str(path)!r} cannot be judged alone, because only ONNX defines what files compute: give the model that "
            "it was exported from (--model and --saved), or compare it with another file"
        )
    twin = file.float_twin()
    none = dict.fromkeys(("largest", "uncompared", "output_local", "output_steps", "violations", "weights", "changes"))
    target = find_backend(backend) if backend is not None else None  # pyrefly: ignore
    demanded = {"violations": 0} if target is not None and target.constraints else {}
    bounds = Limits.parse({**none, **demanded, **(limits or {})})
    proof = Proof(str(path), file.size, twin.size, limits=bounds, notes=[_ALONE])
    if target is not None:
        add_violations(proof, target, file)
    expected = RUNTIMES.get("reference")().open(file)
    for name in runtimes or (["reference"] if file.stands_in else ["onnxruntime"]):
        runtime = RUNTIMES.get(name)()
        found = proof.runtimes[name] = _compared(runtime, file, expected, file, data)
        if latency and not runtime.stands_in:
            feeds = _feeds(file, data[0])
            found.latency = measure_latency(runtime, file, twin, feeds)
            found.memory = measure_memory(runtime, file, twin, feeds, found.latency.batch)
        if proof.limits is not None:
            proof.missed += proof.limits.missed_by(found)
    return proof


def compare_files(
    a: str | os.PathLike[str], b: str | os.PathLike[str], batches: Iterable[Any], *, runtime: str = "onnxruntime"
) -> RuntimeProof:
    """Run two files in a runtime: how far the outputs of ``b`` are from those of ``a``, how ``b`` runs, and how fast.

    The latency compares ``b`` with ``a`` instead of FP32.
    """
    first, data = _read(a, batches)
    second = format_of(Path(b)).read(Path(b))
    program = RUNTIMES.get(runtime)()
    found = _compared(program, second, program.open(first), first, data)
    if first.inputs == second.inputs:
        found.latency = measure_latency(program, second, first, _feeds(first, data[0]))
    return found


def _read(path: str | os.PathLike[str], batches: Iterable[Any]) -> tuple[LoadedFile, list[Inputs]]:
    file = format_of(Path(path)).read(Path(path))
    count = len(file.inputs)
    data = [as_inputs(b, count) for b in itertools.islice(as_batches(batches), MOST_BATCHES)]
    if not data:
        raise VerifyError("the data to verify with is empty: it yielded no batch")
    return file, data


def _compared(
    runtime: Runtime, file: LoadedFile, expected: Session, its_file: LoadedFile, data: list[Inputs]
) -> RuntimeProof:
    proof = RuntimeProof(runtime.name, runtime.version, dict(runtime.settings))
    session, tally, simulation = runtime.open(file), OutputTally(file.outputs, set()), _Expected(its_file, expected)
    for inputs in data:
        feeds = _feeds(file, inputs)
        results = session(feeds)
        if inputs is data[0]:
            add_coverage(proof, runtime, runtime.profile(file, feeds), file, None, feeds)
        tally.add(simulation, inputs, results, None)
    proof.outputs = tally.checks()
    return proof


class _Expected(nn.Module):
    """The results of another session, instead of a simulation."""

    def __init__(self, file: LoadedFile, session: Session) -> None:
        super().__init__()
        self._file, self._session = file, session

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        results = self._session(_feeds(self._file, Inputs(args, kwargs)))
        return [as_tensor(results[name]) for name in self._file.outputs if name in results]


def _feeds(file: LoadedFile, inputs: Inputs) -> dict[str, Any]:
    named = {**dict(zip(file.inputs, inputs.args, strict=False)), **inputs.kwargs}
    if sorted(named) != sorted(file.inputs):
        raise VerifyError(f"the file takes the inputs {file.inputs}, but the batch has {inputs}")
    return {name: as_array(value) for name, value in named.items()}
