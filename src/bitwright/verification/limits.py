"""Limits: what a file must meet, and what it misses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isinf

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.verification.proof import OutputCheck, RuntimeProof, TensorCheck
from bitwright.verification.violation import Violation, violations_in_words


@dataclass(frozen=True)
class Limits:
    """Limits that a file must meet in every runtime; None sets no limit. What was not measured misses its limit.

    The first seven are the default: they say that the file does what the simulation does.

    Attributes:
        largest: largest gap of a quantized value, in steps, layer by layer from equal inputs. A value on a rounding
            border, or a sigmoid computed in another way, is one step off.
        uncompared: how many placed quantizers may stay uncompared without a good reason.
        output_local: largest difference of an output computed from the runtime's own quantized tensors, or from the
            simulation's if that is closer, as a share of its magnitude, as from float arithmetic in another order.
        output_steps: largest difference of an output to the free-running simulation, in units of what one step of noise
            at every quantizer does to it.
        violations: how many places may break constraints of the target; advice does not count.
        weights: largest gap of a stored weight, in steps. The file holds the very integers of the model.
        changes: how many parts of the file, such as stored tensors and operators, may differ from what ``export``
            writes for the model.
        output: largest difference of an output to the free-running simulation, as a share of its magnitude.
        coverage: minimum share of the executed operators in integers, from 0 to 1, by number.
        coverage_multiply_adds: the same by multiplications and additions.
        equal: minimum share of quantized values equal to the simulation, from 0 to 1.
        speedup: minimum speedup over FP32.
    """

    largest: int | None = 1
    uncompared: int | None = 0
    output_local: float | None = 1e-3
    output_steps: float | None = 1.0
    violations: int | None = 0
    weights: int | None = 0
    changes: int | None = 0
    output: float | None = None
    coverage: float | None = None
    coverage_multiply_adds: float | None = None
    equal: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"the limit {field.name} must be a number of at least 0, or None, not {value!r}")

    @classmethod
    def parse(cls, limits: "Limits | Mapping[str, float | None] | None") -> "Limits | None":
        """Read limits: a mapping changes the defaults; None, or a mapping of only None, sets no limits."""
        if isinstance(limits, Mapping):
            known = [f.name for f in fields(cls)]
            for name in limits:
                if name not in known:
                    raise UnknownNameError(f"unknown limit {name!r}{suggest(name, known)}")
            given = replace(DEFAULT, **dict(limits))  # pyrefly: ignore
            alone = "violations" not in limits and given == replace(NO_LIMITS, violations=DEFAULT.violations)
            limits = NO_LIMITS if alone else given
        elif limits is not None and not isinstance(limits, Limits):
            raise ConfigError(f"limits must be a dict such as {{'largest': 1}}, Limits(…) or None, not {limits!r}")
        return None if limits == NO_LIMITS else limits

    def broken_by(self, violations: Sequence[Violation]) -> list[str]:
        """List all violations if there are more than allowed."""
        broken = [v for v in violations if not v.advice]
        return [] if self.violations is None or len(broken) <= self.violations else violations_in_words(broken)

    def exceeded_by(self, changes: Sequence[str] | None, why: str) -> list[str]:
        """Say what was changed in the file, if it is more than allowed, or why that is not known."""
        if self.changes is None:
            return []
        if changes is None:
            return [f"not compared with what export writes for this model: {why}"]
        return [f"the file is not what export writes for this model: {few(changes)}"] * (len(changes) > self.changes)

    def missed_by(self, proof: RuntimeProof) -> list[str]:
        """Say which limits a runtime misses; one that crashes misses them all."""
        if proof.crash:
            return [f"{proof.runtime}: {proof.crash}"]
        return [
            f"{proof.runtime}: {line}" for line in (*self._tensors(proof), *self._outputs(proof), *self._rest(proof))
        ]

    def _tensors(self, proof: RuntimeProof) -> Iterator[str]:
        if self.largest is not None:
            if proof.largest is None:
                yield "no quantized value was compared"
            elif proof.largest > self.largest:
                first = next(t.name for t in proof.compared if (t.largest or 0) > self.largest)
                yield f"a quantized value is off by {proof.largest} steps, more than {self.largest} (first: {first})"
        if self.weights is not None:
            for check in (t for t in proof.compared if t.kind == "weight" and (t.largest or 0) > self.weights):
                yield f"the stored weight {check.name} has values off by {check.largest}, more than {self.weights}"
        if self.uncompared is not None and len(proof.uncompared) > self.uncompared:
            yield _not_compared(proof.uncompared)
        yield from _too_low(proof.equal, self.equal, "of the quantized values equal the simulation", 3)

    def _outputs(self, proof: RuntimeProof) -> Iterator[str]:
        wanted = {name: limit for name in _JUDGED if (limit := getattr(self, name)) is not None}
        if wanted and not proof.outputs:
            yield "no output was compared"
        for check in proof.outputs:
            found = [check.problem] if check.problem else [_excess(check, *each) for each in wanted.items()]
            yield from (f"the output {check.name} {words}" for words in found if words)

    def _rest(self, proof: RuntimeProof) -> Iterator[str]:
        yield from _too_low(proof.coverage, self.coverage, "of the executed operators run in integers", 1)
        part = "of the multiplications and additions run in integers"
        yield from _too_low(proof.coverage_multiply_adds, self.coverage_multiply_adds, part, 1)
        if self.speedup is not None:
            speedup = proof.latency.speedup if proof.latency is not None else None
            if speedup is None:
                yield "the speed was not measured"
            elif not speedup >= self.speedup:
                yield f"{speedup:.2f} times the speed of FP32, less than {self.speedup:.2f}"


_JUDGED = {
    "output_local": "computed from the runtime's own quantized tensors differs by {:.3%} of its magnitude",
    "output_steps": "differs by {:.2f} times what one step of noise at every quantizer does",
    "output": "differs by {:.2%} of its magnitude",
}


def _excess(check: OutputCheck, name: str, limit: float) -> str:
    """How an output exceeds a limit, or nothing."""
    value = _measured(check, name)
    if value is None:
        return f"was not measured ({name})"
    if name == "output_steps" and isinf(value):
        return "differs, and no quantized tensor before it explains that"
    return "" if value <= limit else f"{_JUDGED[name].format(value)}, more than {limit:g}"


DEFAULT = Limits()
NO_LIMITS = Limits(*[None] * len(fields(Limits)))


def _not_compared(missing: Sequence[TensorCheck]) -> str:
    named = few([f"{t.name} ({t.reason})" for t in missing])
    return f"{len(missing)} placed quantizers were not compared: {named}"


def few(found: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _measured(check: OutputCheck, limit: str) -> float | None:
    return {"output_local": check.local, "output_steps": check.steps, "output": check.relative}[limit]


def _too_low(value: float | None, limit: float | None, what: str, digits: int) -> Iterator[str]:
    if limit is None:
        return
    if value is None:
        yield f"not measured: the share {what}"
    elif not value >= limit:
        yield f"{value:.{digits}%} {what}, less than {limit:.{digits}%}"
