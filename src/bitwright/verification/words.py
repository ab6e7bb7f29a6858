"""A proof in words: what ``print(proof)`` shows."""

from collections import Counter
from collections.abc import Iterator

from bitwright.reporting.text import percent, smaller
from bitwright.verification.proof import Latency, Memory, Proof, RuntimeProof
from bitwright.verification.violation import violations_in_words

_MOST_FLOAT = 12


def in_words(proof: Proof) -> str:
    """The proof as text of a few lines."""
    lines = [f"{proof.file}: {proof.size / 1e6:.2f} MB, {smaller(proof.size, proof.float_size)} than FP32"]
    for runtime in proof.runtimes.values():
        lines += runtime_in_words(runtime)
    broken = violations_in_words(v for v in proof.violations if not v.advice)
    told = {
        "advice": violations_in_words(v for v in proof.violations if v.advice),
        "VIOLATED": [line for line in broken if line not in proof.missed],
        "note": proof.notes,
        "MISSED": proof.missed,
    }
    for kind, those in told.items():
        lines += [f"{kind}: {line}" for line in those]
    return "\n".join([*lines, proof.verdict])


def runtime_in_words(proof: RuntimeProof) -> Iterator[str]:
    """What one runtime does with the file, in a few lines."""
    if proof.crash:
        yield f"{proof.runtime} {proof.version}: {proof.crash}"
        return
    yield f"{proof.runtime} {proof.version}: {_coverage(proof)}"
    for line in _float(proof):
        yield f"  float: {line}"
    yield f"  {_tensor(proof)}"
    if proof.first_deviation:
        why = f"; {proof.diagnosis}" if proof.diagnosis is not None else ""
        yield f"  first tensor off by more than one step: {proof.first_deviation.name}{why}"
    for tensor in proof.uncompared:
        yield f"  not compared: {tensor.name} ({tensor.reason})"
    yield f"  {_output(proof)}"
    if proof.latency:
        yield f"  {_latency(proof.latency)}"
    if proof.memory:
        yield f"  {_memory(proof.memory)}"
    yield from (f"  note: {note}" for note in proof.notes)


def _coverage(proof: RuntimeProof) -> str:
    """How much runs in integers, by number, multiply–adds and time."""
    if proof.coverage is None:
        return "what runs in integers was not measured"
    kinds = Counter(o.kind for o in proof.operators)
    counts = ", ".join("{}/{} {}".format(*proof.count(kind), kind) for kind in kinds)
    weighted = {"multiply–adds": proof.coverage_multiply_adds, "time": proof.coverage_time}
    more = ", ".join(f"{percent(share, 0)} of {what}" for what, share in weighted.items() if share is not None)
    return f"{percent(proof.coverage, 0)} in integers ({counts})" + (f"; {more}" if more else "")


def _float(proof: RuntimeProof) -> Iterator[str]:
    """The operators that ran in float, those of one kind and reason in one line."""
    groups = list(proof.float_groups().items())
    for (kind, runs_as, reason), names in groups[:_MOST_FLOAT]:
        named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"{named} ({kind}, runs as {runs_as})" + (f": {reason}" if reason else "")
    if len(groups) > _MOST_FLOAT:
        yield f"and {sum(len(names) for _, names in groups[_MOST_FLOAT:])} more operators"


def _tensor(proof: RuntimeProof) -> str:
    """How the quantized tensors compare."""
    if proof.largest is None:
        return "no quantized tensor was compared"
    gap = f"largest gap {proof.largest} step(s) in {len(proof.compared)} tensors"
    if proof.equal is None:
        return gap
    return f"{percent(proof.equal, 3)} of quantized values equal the simulation, {gap}"


def _output(proof: RuntimeProof) -> str:
    """How the outputs compare."""
    problems = [f"{o.name} {o.problem}" for o in proof.outputs if o.problem]
    worst = proof.worst_output("relative")
    if problems or worst is None:
        return "outputs: " + ("; ".join(problems) or "not compared")
    name = max(proof.outputs, key=lambda o: o.relative or 0.0).name
    steps = proof.worst_output("steps")
    apart = "" if not steps else f", {steps:.2g} times what one step of noise everywhere does"
    return f"outputs differ by at most {worst:.2%} of their range ({name}){apart}"


def _memory(m: Memory) -> str:
    """What it takes at its peak."""
    share = "" if m.share is None else f", {m.share:.2f}x of FP32"
    return f"{m.quantized_bytes / 1e6:.1f} MB at the peak{share} ({m.float_bytes / 1e6:.1f} MB)"


def _latency(t: Latency) -> str:
    """The speed."""
    text = f"{t.quantized_ms:.2f} ms, {t.speedup:.2f}x the speed of FP32 ({t.float_ms:.2f} ms)"
    if t.default_problem:
        return f"{text}; not timed with float parts in {t.default_precision}, the default: {t.default_problem}"
    if t.default_speedup is None:
        return text
    by_default = f"{t.default_quantized_ms:.2f} ms against {t.default_float_ms:.2f} ms, {t.default_speedup:.2f}x"
    return f"{text}; by default, float parts in {t.default_precision}: {by_default}"
