"""Proof: what verify found, as plain values that print, compare with limits, and turn into JSON."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TensorCheck:
    """One quantized tensor of the file against the simulation, both computed from the same inputs.

    Attributes:
        name: the node of the model whose result is quantized.
        largest: largest difference in quantization steps.
        mean: mean difference in steps.
        equal: share of values that are equal, from 0 to 1.
        values: how many values were compared.
    """

    name: str
    largest: int
    mean: float
    equal: float
    values: int


@dataclass
class OperatorCheck:
    """One operator of the file and how the runtime executes it.

    Attributes:
        name: the user's module or node.
        kind: conv, linear, matmul, add …
        integer: whether it runs in integers.
        runs_as: what the runtime turned it into.
        reason: why it runs in float, where that is known.
    """

    name: str
    kind: str
    integer: bool
    runs_as: str
    reason: str = ""


@dataclass
class OutputCheck:
    """One output of the file against the free-running simulation."""

    name: str
    largest: float
    mean: float
    relative: float  # largest difference over the largest magnitude of the simulation's output


@dataclass
class Latency:
    """Best of several interleaved runs on one thread, in milliseconds, against FP32 in the same runtime."""

    quantized_ms: float
    float_ms: float
    batch: int

    @property
    def speedup(self) -> float:
        """How many times faster than FP32."""
        return self.float_ms / self.quantized_ms


@dataclass
class RuntimeProof:
    """What one runtime does with the file."""

    runtime: str
    version: str
    outputs: list[OutputCheck] = field(default_factory=list)
    tensors: list[TensorCheck] = field(default_factory=list)
    operators: list[OperatorCheck] = field(default_factory=list)
    latency: Latency | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """Share of convolutions, linears, matrix products and additions that run in integers."""
        return sum(o.integer for o in self.operators) / len(self.operators) if self.operators else 1.0

    def count(self, kind: str) -> tuple[int, int]:
        """How many operators of a kind run in integers, and how many there are."""
        chosen = [o for o in self.operators if o.kind == kind]
        return sum(o.integer for o in chosen), len(chosen)

    @property
    def equal(self) -> float:
        """Share of all quantized values that equal the simulation's, layer by layer from equal inputs."""
        total = sum(t.values for t in self.tensors)
        return sum(t.equal * t.values for t in self.tensors) / total if total else 1.0

    @property
    def largest(self) -> int:
        """Largest difference of any quantized value, in steps."""
        return max((t.largest for t in self.tensors), default=0)

    @property
    def first_deviation(self) -> TensorCheck | None:
        """The first tensor that is off by more than one step."""
        return next((t for t in self.tensors if t.largest > 1), None)


@dataclass
class Proof:
    """What was found about a file.

    Attributes:
        file: the file.
        size: its size in bytes.
        float_size: the size of the same model in FP32.
        runtimes: a RuntimeProof by the name of the runtime.
        missed: limits that were set and not kept, in words.
        notes: what else there is to know.
    """

    file: str
    size: int
    float_size: int
    runtimes: dict[str, RuntimeProof] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every limit was kept."""
        return not self.missed

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        for name, runtime in self.runtimes.items():
            data["runtimes"][name] |= {
                "coverage": runtime.coverage,
                "equal": runtime.equal,
                "largest": runtime.largest,
                "speedup": runtime.latency.speedup if runtime.latency else None,
            }
        return data | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.size / 1e6:.2f} MB, {self.float_size / max(self.size, 1):.1f}x smaller than FP32"]
        for proof in self.runtimes.values():
            kinds = dict.fromkeys(o.kind for o in proof.operators)
            counts = ", ".join("{}/{} {}".format(*proof.count(k), k) for k in kinds)
            lines.append(f"{proof.runtime} {proof.version}: {proof.coverage:.0%} in integers ({counts})")
            for operator in proof.operators:
                if not operator.integer:
                    why = f": {operator.reason}" if operator.reason else ""
                    lines.append(f"  float: {operator.name} ({operator.kind}, runs as {operator.runs_as}){why}")
            if proof.tensors:
                share = math.floor(proof.equal * 1e5) / 1e5  # never rounded up to 100 %
                lines.append(
                    f"  {share:.3%} of quantized values equal the simulation, largest gap {proof.largest} step(s)"
                )
            if proof.first_deviation:
                lines.append(f"  first tensor off by more than one step: {proof.first_deviation.name}")
            if proof.outputs:
                worst = max(proof.outputs, key=lambda o: o.relative)
                lines.append(f"  outputs differ by at most {worst.relative:.2%} of their range ({worst.name})")
            if proof.latency:
                t = proof.latency
                lines.append(f"  {t.quantized_ms:.2f} ms, {t.speedup:.2f}x the speed of FP32 ({t.float_ms:.2f} ms)")
            lines += [f"  note: {note}" for note in proof.notes]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"MISSED: {miss}" for miss in self.missed]
        return "\n".join(lines)
