"""verify: run the file where it will run, compare it with the simulation, count what runs in integers, time it."""

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bitwright.calibration import as_batches, as_inputs
from bitwright.errors import ConfigError, UnknownNameError, VerifyError, require, suggest
from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.inputs import bind_inputs
from bitwright.modes import eval_mode
from bitwright.preparation import Ledger, ledger_of
from bitwright.progress import track
from bitwright.verification.compare import OutputTally, TensorTally, simulate
from bitwright.verification.proof import Latency, OperatorCheck, Proof, RuntimeProof
from bitwright.verification.runtimes.base import RUNTIMES, Runtime, Session

if TYPE_CHECKING:
    import onnx

_MOST_BATCHES = 8
_RUNS, _WARM_UP = 15, 3


@dataclass(frozen=True)
class Limits:
    """What a file must keep, in every runtime; None sets no limit.

    Attributes:
        coverage: least share of operators in integers, from 0 to 1.
        equal: least share of quantized values equal to the simulation, from 0 to 1.
        largest: largest gap of a quantized value, in steps.
        speedup: least speed against FP32.
        output: largest difference of an output, as a share of its range.
    """

    coverage: float | None = None
    equal: float | None = None
    largest: int | None = None
    speedup: float | None = None
    output: float | None = None

    @classmethod
    def parse(cls, limits: "Limits | Mapping[str, float] | None") -> "Limits":
        """Read limits from a mapping."""
        if isinstance(limits, Limits):
            return limits
        known = [f.name for f in fields(cls)]
        for name in limits or {}:
            if name not in known:
                raise UnknownNameError(f"unknown limit {name!r}{suggest(name, known)}")
        return cls(**dict(limits or {}))  # pyrefly: ignore

    def missed_by(self, proof: RuntimeProof) -> list[str]:
        """Say which limits a runtime misses."""
        missed = []
        if self.coverage is not None and proof.coverage < self.coverage:
            missed.append(f"{proof.coverage:.1%} of the operators run in integers, less than {self.coverage:.1%}")
        if self.equal is not None and proof.equal < self.equal:
            missed.append(f"{proof.equal:.3%} of the quantized values equal the simulation, less than {self.equal:.3%}")
        if self.largest is not None and proof.largest > self.largest:
            missed.append(f"a quantized value is off by {proof.largest} steps, more than {self.largest}")
        if self.speedup is not None and proof.latency is not None and proof.latency.speedup < self.speedup:
            missed.append(f"{proof.latency.speedup:.2f} times the speed of FP32, less than {self.speedup:.2f}")
        worst = max((o.relative for o in proof.outputs), default=0.0)
        if self.output is not None and worst > self.output:
            missed.append(f"an output differs by {worst:.2%} of its range, more than {self.output:.2%}")
        return [f"{proof.runtime}: {line}" for line in missed]


def verify(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    runtimes: Iterable[str] | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    latency: bool = True,
    progress: bool | None = None,
) -> Proof:
    """Prove that an exported file does what the calibrated ``model`` simulates.

    Args:
        model: the prepared and calibrated model that was exported.
        path: the file.
        batches: inputs as for ``calibrate``; at most 8 of them are used.
        runtimes: where to run the file; by default all that the backend names and that are installed.
        limits: what must be kept; what is not goes to ``proof.missed``.
        latency: measure the speed against FP32 in the same runtime.
        progress: show a progress bar; by default only on a terminal.
    """
    onnx_file = _onnx_file()
    bounds = Limits.parse(limits)
    if bounds.speedup is not None and not latency:
        raise ConfigError("a limit on the speedup needs latency=True")
    ledger = ledger_of(model)
    chosen = _choose(runtimes, ledger)
    file = Path(path)
    loaded = onnx_file.load(file)
    count = len(ledger.example.args)
    data = [as_inputs(b, count) for b in itertools.islice(as_batches(batches), _MOST_BATCHES)]
    if not data:
        raise VerifyError("the data to verify with is empty: it gave no batch")
    twin = onnx_file.float_twin(loaded)
    proof = Proof(str(file), file.stat().st_size, twin.ByteSize())
    with eval_mode(model):
        for runtime in chosen:
            try:
                found = _prove(model, loaded, runtime, data, ledger, progress)
                if latency:
                    found.latency = _time(runtime, loaded, twin, _named(model, data[0]))
            except VerifyError as error:
                if runtimes is not None or runtime.name == ledger.backend.runtimes[0]:
                    raise
                proof.notes.append(f"not proven in {runtime.name}, which this file is not made for: {error}")
                continue
            proof.runtimes[runtime.name] = found
            proof.missed += bounds.missed_by(found)
    return proof


def run_file(path: str | os.PathLike[str], runtime: str = "onnxruntime") -> Callable[..., Any]:
    """Load an exported file as a function from tensors to tensors, to be called as the model is."""
    program = RUNTIMES.get(runtime)()
    loaded = _onnx_file().load(Path(path))
    session = program.session(loaded)
    names = [i.name for i in loaded.graph.input]
    outputs = [o.name for o in loaded.graph.output]

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:  # noqa: ANN401
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(names) or sorted(given) != sorted(names):
            raise ConfigError(f"the file takes the inputs {names}; {len(args)} and {sorted(kwargs)} were given")
        results = session({k: _array(v) for k, v in given.items()})
        tensors = tuple(torch.from_numpy(np.array(results[name])) for name in outputs)
        return tensors[0] if len(tensors) == 1 else tensors

    return call


def _onnx_file() -> ModuleType:
    """The module that reads ONNX files, or the word which extra it needs."""
    require("onnx", "onnx", "verifying a file")
    from bitwright.verification import onnx_file

    return onnx_file


def _choose(names: Iterable[str] | None, ledger: Ledger) -> list[Runtime]:
    if names is not None:
        chosen = [names] if isinstance(names, str) else list(names)
        if not chosen:
            raise ConfigError("name at least one runtime to verify in, or leave the choice to the backend")
        return [RUNTIMES.get(n)() for n in chosen]
    installed = [RUNTIMES.get(n)() for n in ledger.backend.runtimes if RUNTIMES.get(n).available()]
    if not installed:
        first = RUNTIMES.get(ledger.backend.runtimes[0]) if ledger.backend.runtimes else None
        if first is None:
            raise VerifyError(f"no runtime on this machine executes files for {ledger.backend.name}")
        first()
    return installed


def _prove(
    model: nn.Module,
    loaded: "onnx.ModelProto",
    runtime: Runtime,
    data: list[Inputs],
    ledger: Ledger,
    progress: bool | None,
) -> RuntimeProof:
    onnx_file = _onnx_file()
    proof = RuntimeProof(runtime.name, runtime.version)
    proof.operators = _coverage(loaded, runtime, ledger)
    session = runtime.session(loaded)
    integers = onnx_file.quantized_tensors(loaded)
    watched = None
    if isinstance(model, CapturedModel) and integers:
        watched = runtime.session(onnx_file.with_outputs(loaded, integers))
    outputs, tensors = OutputTally(), TensorTally()
    names = [o.name for o in loaded.graph.output]
    for inputs in track(data, f"verifying in {runtime.name}", show=progress):
        feeds = _feeds(loaded, _named(model, inputs))
        try:
            results = session(feeds)
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            raise VerifyError(f"{runtime.name} cannot run the file on the batch {inputs}: {first}") from error
        for name, ours in zip(names, simulate(model, inputs), strict=False):
            outputs.add(name, ours, results[name])
        if watched is not None and isinstance(model, CapturedModel):
            seen = {name.removesuffix(onnx_file.WIDE): values for name, values in watched(feeds).items()}
            tensors.follow(model, inputs, seen)
    proof.outputs, proof.tensors = outputs.checks(), list(tensors.checks.values())
    if watched is None:
        proof.notes.append("tensors inside the model were not compared: it is not captured as one graph")
    if _wide_weights(loaded) and not _has_vnni():
        proof.notes.append(
            "this CPU has no VNNI: it adds pairs of u8×s8 products in 16 bits, which saturate with weights of 8 bits; "
            "weights of 7 bits (the default) do not"
        )
    return proof


def _coverage(loaded: "onnx.ModelProto", runtime: Runtime, ledger: Ledger) -> list[OperatorCheck]:
    operators = _onnx_file().operators(loaded)
    executed = runtime.executed_as(loaded, operators)
    reasons = {e.name: e.reason for e in ledger.entries if e.verdict.value in ("float", "partly")}
    checks = []
    for operator in operators:
        integer, runs_as = executed[operator.name]
        reason: str | None = ""
        if not integer:
            # A module with several operators, such as attention, numbers them.
            reason = runtime.reasons.get(operator.op_type) or reasons.get(operator.name.partition("/")[0])
            reason = reason or f"{runtime.name} did not join it with its quantizers"
        checks.append(OperatorCheck(operator.name, operator.kind, integer, runs_as, reason or ""))
    return checks


def _time(runtime: Runtime, loaded: "onnx.ModelProto", twin: "onnx.ModelProto", inputs: dict[str, Any]) -> Latency:
    """Best of several interleaved runs, one thread, one sample if the file takes one."""
    sessions = [runtime.session(loaded, threads=1), runtime.session(twin, threads=1)]
    feeds = _feeds(loaded, _first_sample(inputs))
    try:
        sessions[0](feeds)
    except Exception:  # a file with a fixed batch size
        feeds = _feeds(loaded, inputs)
    best = [float("inf")] * 2
    for run in range(_WARM_UP + _RUNS):
        for i, session in enumerate(sessions):
            elapsed = _seconds(session, feeds)
            if run >= _WARM_UP:
                best[i] = min(best[i], elapsed)
    batch = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
    return Latency(best[0] * 1e3, best[1] * 1e3, batch)


def _seconds(session: Session, feeds: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    session(feeds)
    return time.perf_counter() - start


def _named(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    return bind_inputs(model, inputs.args, inputs.kwargs)


def _first_sample(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v[:1] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in inputs.items()}


def _feeds(loaded: "onnx.ModelProto", inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    wanted = [i.name for i in loaded.graph.input]
    missing = [n for n in wanted if n not in inputs]
    if missing:
        raise VerifyError(f"the file wants inputs {wanted}, the model has {list(inputs)}: was it made from this model?")
    return {name: _array(inputs[name]) for name in wanted}


def _array(value: Any) -> np.ndarray:  # noqa: ANN401
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _wide_weights(loaded: "onnx.ModelProto") -> bool:
    return any(np.abs(w.astype(np.int16)).max(initial=0) > 64 for w in _onnx_file().integer_weights(loaded))


def _has_vnni() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_vnni" in flags or "avx_vnni" in flags
