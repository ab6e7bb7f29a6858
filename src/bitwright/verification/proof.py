"""Proof: the findings of verify, as plain values that print, compare with limits, and convert to JSON.

What was not measured is None, and None misses every limit.
"""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from bitwright.verification.violation import Violation

if TYPE_CHECKING:
    from bitwright.verification.limits import Limits

_NAMED = 6  # operators that words name
_SLOWER, _LEAST_LOSS = 1.1, 1.0  # factor, and microseconds, that separate slower from noise


@dataclass
class TensorCheck:
    """One quantized tensor of the file compared with the simulation, both computed from the same inputs.

    Attributes:
        name: the node, layer or input whose value is quantized.
        largest: largest difference in quantization steps; None if nothing was compared.
        mean: mean difference in steps.
        equal: share of values that are equal, from 0 to 1.
        values: the number of values compared.
        kind: ``activation`` if it is computed, ``weight`` if the file stores it.
        reason: why it was not compared.
        excused: whether that is a good reason: the file does not compute this tensor and does not need it.
    """

    name: str
    largest: int | None = None
    mean: float | None = None
    equal: float | None = None
    values: int = 0
    kind: Literal["activation", "weight"] = "activation"
    reason: str = ""
    excused: bool = False


@dataclass
class OperatorCheck:
    """One computation that the runtime executed.

    Attributes:
        name: the user's modules or nodes that it computes.
        kind: the operator: conv2d, linear, softmax …
        integer: whether it ran in integers.
        runs_as: the runtime's name for it.
        reason: why it ran in float, if known.
        multiply_adds: the number of multiplications and additions; None if its shapes are unknown.
        microseconds: its time, the minimum of several runs.
        float_microseconds: the time of the same in the float network; None if unknown.
        nodes: the operators of the file that it covers.
    """

    name: str
    kind: str
    integer: bool
    runs_as: str
    reason: str = ""
    multiply_adds: int | None = 0
    microseconds: float = 0.0
    float_microseconds: float | None = None
    nodes: tuple[str, ...] = ()


@dataclass
class OutputCheck:
    """One output of the file.

    A difference is infinite if one side is not finite and the other differs; NaN equals NaN.

    Attributes:
        name: the output.
        largest: largest difference to the free-running simulation.
        mean: mean difference.
        relative: the largest difference over the largest magnitude of the simulation's output.
        steps: the largest difference over what one step of noise at every quantizer does to this output.
        local: largest difference, as a share of the magnitude, where the simulation computes the output from the
            runtime's own quantized tensors, so that only what comes after the last of them differs.
        problem: what is wrong with the whole output: missing, superfluous, or of another shape or type.
    """

    name: str
    largest: float | None = None
    mean: float | None = None
    relative: float | None = None
    steps: float | None = None
    local: float | None = None
    problem: str = ""


@dataclass
class Latency:
    """Best of several interleaved runs on one thread, in milliseconds, against FP32 in the same runtime.

    Attributes:
        quantized_ms: the file, with float32 where it computes in float.
        float_ms: the same network in float32.
        batch: the number of samples in one run.
        default_precision: the runtime's default precision for float parts, if not float32.
        default_quantized_ms: the file in that precision.
        default_float_ms: the float network in that precision.
        default_problem: why the runtime could not be timed in that precision, if so.
    """

    quantized_ms: float
    float_ms: float
    batch: int
    default_precision: str = ""
    default_quantized_ms: float | None = None
    default_float_ms: float | None = None
    default_problem: str = ""

    @property
    def speedup(self) -> float:
        """How many times faster than FP32."""
        return self.float_ms / self.quantized_ms

    @property
    def default_speedup(self) -> float | None:
        """How many times faster than the float network, both in the runtime's default precision."""
        if self.default_quantized_ms is None or self.default_float_ms is None:
            return None
        return self.default_float_ms / self.default_quantized_ms


@dataclass
class Memory:
    """Peak memory for loading the file and running one sample, in a fresh process, in bytes.

    Attributes:
        quantized_bytes: of the file, beyond what the runtime's package takes.
        float_bytes: of the same network in FP32.
    """

    quantized_bytes: int
    float_bytes: int

    @property
    def share(self) -> float | None:
        """The file's memory as a share of FP32's; None if FP32's was too small to measure."""
        return self.quantized_bytes / self.float_bytes if self.float_bytes else None


@dataclass
class Diagnosis:
    """Why a runtime computes other values than the file says, as found by testing reasons.

    Attributes:
        tensor: the first quantized tensor that is off by more than one step.
        reasons: explanations: preventing one removes the deviation, or emulating one reproduces the runtime's values.
        words: the same in words.
        tried: everything that was tested.
        alone: whether the layer deviates on its own, not only within the whole file.
        problem: why no reason could be found, if so.
    """

    tensor: str
    reasons: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    alone: bool = False
    problem: str = ""

    def __str__(self) -> str:
        where = "" if self.alone or "file" in self.reasons else " (within the whole file only)"
        if self.reasons:
            pairs = zip(self.reasons, self.words, strict=True)
            return f"likely reason{where}: " + "; ".join(f"{reason}: {words}" for reason, words in pairs)
        return f"no reason found: {self.problem or 'tried ' + (', '.join(self.tried) or 'nothing') + where}"


@dataclass
class RuntimeProof:
    """What one runtime does with the file.

    Attributes:
        runtime: its name.
        version: its version.
        settings: its settings beyond the defaults, to compare in float32.
        outputs: the outputs of the file.
        tensors: the quantized tensors, compared, or with the reason why not.
        operators: what it executed, except what only moves or converts values.
        others: the number of executed operators that move values, convert them, or compute indices.
        unweighed: the layers and products that no executed operator accounts for.
        latency: its speed, if measured.
        crash: how it crashed or hung, and at which operator, if it did.
        diagnosis: why it deviates, if it does by more than one step.
        memory: its peak memory, if measured.
        notes: what else there is to know.
    """

    runtime: str
    version: str
    settings: dict[str, str] = field(default_factory=dict)
    outputs: list[OutputCheck] = field(default_factory=list)
    tensors: list[TensorCheck] = field(default_factory=list)
    operators: list[OperatorCheck] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    unweighed: list[str] = field(default_factory=list)
    latency: Latency | None = None
    crash: str = ""
    notes: list[str] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    memory: Memory | None = None

    @property
    def coverage(self) -> float | None:
        """Share of the executed operators that ran in integers, by number.

        A layer counts as not in integers if the runtime does not tell how it ran.
        """
        total = len(self.operators) + len(self.unweighed)
        return sum(o.integer for o in self.operators) / total if self.operators else None

    @property
    def coverage_multiply_adds(self) -> float | None:
        """The same by multiplications and additions; None where those of an operator are not known."""
        counts = [o.multiply_adds for o in self.operators]
        total = None if None in counts else sum(n or 0 for n in counts)
        if not total or self.unweighed:
            return None
        return sum(o.multiply_adds or 0 for o in self.operators if o.integer) / total

    @property
    def coverage_time(self) -> float | None:
        """The same by the time that the operators took."""
        total = sum(o.microseconds for o in self.operators)
        return sum(o.microseconds for o in self.operators if o.integer) / total if total else None

    @property
    def floats(self) -> list[OperatorCheck]:
        """The operators that ran in float."""
        return [o for o in self.operators if not o.integer]

    @property
    def slower(self) -> list[OperatorCheck]:
        """The operators that take longer in integers than in float, by more than timing fluctuates; worst first."""
        lost = {
            i: o.microseconds - o.float_microseconds
            for i, o in enumerate(self.operators)
            if o.integer
            and o.float_microseconds is not None
            and o.microseconds > _SLOWER * o.float_microseconds + _LEAST_LOSS
        }
        return [self.operators[i] for i in sorted(lost, key=lost.__getitem__, reverse=True)]

    def slower_words(self) -> str:
        """The same in words, with both times; empty if there are none."""
        found = self.slower
        named = [f"{o.name} ({o.microseconds:.0f} µs, not {o.float_microseconds:.0f} µs)" for o in found[:_NAMED]]
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"slower than in float: {', '.join(named)}{more}" if found else ""

    def float_groups(self) -> dict[tuple[str, str, str], list[str]]:
        """The names of the operators that ran in float, by their kind, what they ran as, and the reason."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for o in self.floats:
            groups.setdefault((o.kind, o.runs_as, o.reason), []).append(o.name)
        return groups

    def count(self, kind: str) -> tuple[int, int]:
        """How many operators of a kind ran in integers, and how many there are."""
        chosen = [o for o in self.operators if o.kind == kind]
        return sum(o.integer for o in chosen), len(chosen)

    def __str__(self) -> str:
        from bitwright.verification.words import runtime_in_words

        return "\n".join(runtime_in_words(self))

    __repr__ = __str__

    @property
    def compared(self) -> list[TensorCheck]:
        """The quantized tensors that were compared."""
        return [t for t in self.tensors if t.values]

    @property
    def uncompared(self) -> list[TensorCheck]:
        """The quantized tensors that should have been compared and were not."""
        return [t for t in self.tensors if not t.values and not t.excused]

    @property
    def equal(self) -> float | None:
        """Share of the computed quantized values that equal the simulation's, layer by layer from equal inputs."""
        shares = [(t.equal, t.values) for t in self.compared if t.kind == "activation" and t.equal is not None]
        total = sum(values for _, values in shares)
        return sum(equal * values for equal, values in shares) / total if total else None

    @property
    def largest(self) -> int | None:
        """Largest difference of any quantized value, in steps."""
        return max((t.largest for t in self.compared if t.largest is not None), default=None)

    @property
    def first_deviation(self) -> TensorCheck | None:
        """The first tensor that is off by more than one step."""
        return next((t for t in self.compared if t.largest is not None and t.largest > 1), None)

    def worst_output(self, measure: str) -> float | None:
        """The largest of one measure of the outputs; None if there is no output, or one was not measured."""
        found = [getattr(o, measure) for o in self.outputs]
        return max(found) if found and all(v is not None for v in found) else None


@dataclass
class Proof:
    """What was found about a file.

    Attributes:
        float_size: the size of the same model in FP32.
        limits: what had to be kept; None where the file was compared and not judged.
        missed: limits that were not kept, in words.
        notes: what else there is to know.
        constraints: what the target demands of files and was checked, by name, in words.
        violations: where the file breaks that; advice among them.
        changes: what differs from the file that ``export`` writes for the model; None if that was not compared.
    """

    file: str
    size: int
    float_size: int
    runtimes: dict[str, RuntimeProof] = field(default_factory=dict)
    limits: "Limits | None" = None
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    constraints: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    changes: list[str] | None = None

    @property
    def ok(self) -> bool | None:
        """Whether every limit was kept; None where there were no limits."""
        if self.limits is None and not self.missed:
            return None
        return bool(self.runtimes) and not self.missed

    @property
    def verdict(self) -> str:
        """The same in words."""
        where = f" in {' and '.join(self.runtimes)}" if self.runtimes else ""
        if not where and self.ok is None:
            return "written, not verified"
        return {True: "verified", False: "NOT verified", None: "compared, not judged,"}[self.ok] + where

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        for name, runtime in self.runtimes.items():
            data["runtimes"][name] |= {
                "coverage": runtime.coverage,
                "coverage_multiply_adds": runtime.coverage_multiply_adds,
                "coverage_time": runtime.coverage_time,
                "equal": runtime.equal,
                "largest": runtime.largest,
                "uncompared": [t.name for t in runtime.uncompared],
                "slower": [o.name for o in runtime.slower],
                "speedup": runtime.latency.speedup if runtime.latency else None,
            }
        return data | {"ok": self.ok, "verdict": self.verdict}

    def __str__(self) -> str:
        from bitwright.verification.words import in_words

        return in_words(self)

    __repr__ = __str__
