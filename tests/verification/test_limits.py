"""Limits: what was not measured misses every limit, and so does NaN; without limits nothing is judged."""

import math

import pytest

from bitwright.verification import DEFAULT, Limits, Proof, RuntimeProof
from bitwright.verification.proof import Latency, OperatorCheck, OutputCheck, TensorCheck

GOOD = {
    "outputs": [OutputCheck("y", 0.0, 0.0, 0.0, 0.0, 0.0)],
    "tensors": [TensorCheck("a", 0, 0.0, 1.0, 100)],
    "operators": [OperatorCheck("c", "conv2d", True, "QConv", multiply_adds=10, microseconds=1.0)],
}


def proof_of(**parts) -> RuntimeProof:
    return RuntimeProof("demo", "1.0", **{**GOOD, **parts})


def test_empty_proof_keeps_nothing() -> None:
    empty = RuntimeProof("demo", "1.0")
    assert (empty.coverage, empty.coverage_multiply_adds, empty.coverage_time) == (None, None, None)
    assert (empty.equal, empty.largest, empty.first_deviation) == (None, None, None)
    assert empty.worst_output("relative") is None
    every = Limits(output=1.0, coverage=0.0, coverage_multiply_adds=0.0, equal=0.0, speedup=0.0)
    missed = every.missed_by(empty)
    assert len(missed) == 6  # tensors, outputs, equal, both kinds of coverage, speed
    assert DEFAULT.missed_by(empty) == ["demo: no quantized value was compared", "demo: no output was compared"]


def test_empty_proof_is_not_ok() -> None:
    assert Proof("m.onnx", 1, 1, limits=DEFAULT).ok is False
    assert Proof("m.onnx", 1, 1).ok is None
    assert Proof("m.onnx", 1, 1, missed=["accuracy"]).ok is False


def test_good_proof_keeps_the_default() -> None:
    assert DEFAULT.missed_by(proof_of()) == []
    assert Limits(coverage=1.0, coverage_multiply_adds=1.0, equal=1.0, output=0.0).missed_by(proof_of()) == []


@pytest.mark.parametrize("measure", ["steps", "local"])
@pytest.mark.parametrize("value", [math.inf, math.nan, None, 2.0])
def test_bad_output_misses_the_default(measure: str, value: float | None) -> None:
    check = OutputCheck("y", 0.0, 0.0, 0.0, 0.0, 0.0)
    setattr(check, measure, value)
    (line,) = DEFAULT.missed_by(proof_of(outputs=[check]))
    assert "the output y" in line


def test_problem_of_an_output_is_missed_whatever_the_limits() -> None:
    check = OutputCheck("y", problem="is missing in the file")
    none = Limits(None, None, None, None)
    assert none.missed_by(proof_of(outputs=[check])) == ["demo: the output y is missing in the file"]


def test_quantizer_that_was_not_compared_is_missed_unless_excused() -> None:
    lost = TensorCheck("b", reason="the runtime does not expose it")
    (line,) = DEFAULT.missed_by(proof_of(tensors=[*GOOD["tensors"], lost]))
    assert line == "demo: 1 placed quantizers were not compared: b (the runtime does not expose it)"
    constant = TensorCheck("b", reason="a constant", excused=True)
    assert DEFAULT.missed_by(proof_of(tensors=[*GOOD["tensors"], constant])) == []
    assert DEFAULT.missed_by(proof_of(tensors=[constant])) == ["demo: no quantized value was compared"]


def test_gap_of_two_steps_is_missed() -> None:
    (line,) = DEFAULT.missed_by(proof_of(tensors=[TensorCheck("a", 1, 0.1, 0.9, 9), TensorCheck("b", 2, 0.1, 0.9, 9)]))
    assert line == "demo: a quantized value is off by 2 steps, more than 1 (first: b)"


def test_a_mapping_changes_the_default() -> None:
    assert Limits.parse({"coverage": 1.0}) == Limits(coverage=1.0)
    assert Limits.parse({"largest": None}) == Limits(largest=None)
    assert Limits.parse({}) == DEFAULT
    assert Limits.parse(None) is None


def test_coverage_by_number_work_and_time() -> None:
    operators = [
        OperatorCheck("c", "conv2d", True, "QConv", multiply_adds=90, microseconds=6.0),
        OperatorCheck("d", "linear", False, "Gemm", multiply_adds=10, microseconds=2.0),
        OperatorCheck("e", "softmax", False, "Softmax", multiply_adds=0, microseconds=2.0),
    ]
    proof = proof_of(operators=operators)
    assert proof.coverage == pytest.approx(1 / 3)
    assert proof.coverage_multiply_adds == 0.9
    assert proof.coverage_time == 0.6
    assert [o.name for o in proof.floats] == ["d", "e"]
    proof.unweighed = ["f"]
    assert proof.coverage_multiply_adds is None
    missed = Limits(coverage_multiply_adds=0.5).missed_by(proof)
    assert missed == ["demo: not measured: the share of the multiplications and additions run in integers"]


def test_proof_in_words() -> None:
    runtime = RuntimeProof(
        "demo",
        "1.0",
        outputs=[OutputCheck("y", 0.5, 0.1, 0.25, 3.0, 0.0), OutputCheck("z", problem="is missing in the file")],
        tensors=[
            TensorCheck("a", 1, 0.1, 0.5, 100),
            TensorCheck("b", 3, 0.2, 1.0, 300),
            TensorCheck("lost", reason="the runtime does not expose it"),
        ],
        operators=[
            OperatorCheck("c", "conv", True, "QConv", multiply_adds=3),
            OperatorCheck("d", "conv", False, "Conv", "no kernel", multiply_adds=1),
        ],
        latency=Latency(2.0, 5.0, 1, "bf16", 1.0, 3.0),
    )
    proof = Proof("m.onnx", 1_000_000, 4_000_000, {"demo": runtime}, DEFAULT, ["demo: too slow"])
    text = str(proof)
    assert runtime.coverage == 0.5
    assert runtime.equal == 0.875
    assert runtime.largest == 3
    for line in (
        "4.0x smaller than FP32",
        "50% in integers (1/2 conv); 75% of multiply–adds",
        "float: d (conv, runs as Conv): no kernel",
        "first tensor off by more than one step: b",
        "not compared: lost (the runtime does not expose it)",
        "outputs: z is missing in the file",
        "2.00 ms, 2.50x the speed of FP32 (5.00 ms); by default, float parts in bf16: 1.00 ms against 3.00 ms, 3.00x",
        "MISSED: demo: too slow\nNOT verified in demo",
    ):
        assert line in text, line


def test_words_of_a_proof_without_limits() -> None:
    assert str(Proof("m.onnx", 1, 4, {"demo": proof_of()})).endswith("\ncompared, not judged, in demo")
    empty = str(Proof("m.onnx", 1, 4, {"demo": RuntimeProof("demo", "1.0")}, DEFAULT, ["x"]))
    assert "no quantized tensor was compared" in empty
    assert "outputs: not compared" in empty
    assert "100%" not in empty
