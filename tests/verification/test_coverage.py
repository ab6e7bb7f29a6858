"""Coverage: every operator that a runtime executes counts, and those in float are named."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES, Executed, OperatorCheck, RuntimeProof
from bitwright.verification.coverage import add_coverage


def found_in(cases, runtime: str, case: str) -> RuntimeProof:
    model, file, x = cases[runtime, case]
    return bw.verify(model, file, [x], runtimes=[runtime], latency=False).runtimes[runtime]


def test_everything_that_can_runs_in_integers(cases) -> None:
    expected = {
        ("onnxruntime", "residual"): {"conv2d": (3, 3), "add": (1, 1), "linear": (1, 1)},
        ("onnxruntime", "mixture"): {"conv2d": (2, 2), "conv1d": (1, 1), "conv_transpose2d": (1, 1)},
        # The biases of layers on sequences are added in float.
        ("onnxruntime", "attention"): {"linear": (2, 2), "matmul": (2, 2), "add": (1, 3)},
    }
    for (runtime, case), kinds in expected.items():
        found = found_in(cases, runtime, case)
        assert {k: found.count(k) for k in kinds} == kinds, (runtime, case)
    found = found_in(cases, "openvino", "residual")
    assert found.coverage == found.coverage_multiply_adds == 1.0


def test_float_operators_are_named_with_their_reasons(cases) -> None:
    found = found_in(cases, "onnxruntime", "attention")
    floats = {o.kind: o for o in found.floats}
    assert {"layer_norm", "softmax"} <= floats.keys()
    assert floats["softmax"].reason == "onnxruntime's integer softmax is wrong for flat distributions"
    assert floats["layer_norm"].name == "norm"
    assert found.coverage < 1.0
    assert found.coverage_multiply_adds == 1.0
    found = found_in(cases, "onnxruntime", "mixture")
    up = next(o for o in found.operators if o.name == "up")
    assert (up.kind, up.runs_as, up.integer) == ("conv_transpose2d", "QLinearConv", True)


class FloatParts(nn.Module):
    """What was not counted once: a difference, a mean, softmax and gelu, all in float."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.a(x))
        y = y - y.mean(-1, keepdim=True)
        return self.b(torch.softmax(y, -1))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_float_arithmetic_between_integer_layers_is_seen(tmp_path: Path, runtime: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    model = bw.calibrate(bw.prepare(FloatParts().eval(), x, runtime), [x])
    file = bw.export(model, tmp_path / "parts.onnx")
    proof = bw.verify(model, file, [x], runtimes=[runtime], latency=False, limits={"coverage": 1.0})
    found = proof.runtimes[runtime]
    named = " ".join(f"{o.name} {o.kind}" for o in found.floats)
    # OpenVINO computes gelu as part of the layer before it.
    expected = ("mean", "sub", "softmax") if runtime == "openvino" else ("gelu", "mean", "sub", "softmax")
    assert all(part in named for part in expected), named
    assert found.count("linear") == (2, 2)
    assert found.coverage_multiply_adds == 1.0
    assert any("of the executed operators run in integers, less than 100.0%" in m for m in proof.missed)
    assert found.others["conversion"] > 0


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_skipped_layers_stay_float_in_the_runtime(tmp_path: Path, runtime: str) -> None:
    """Onnxruntime would quantize their weights by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(800, 4),
    ).eval()
    x = torch.randn(4, 3, 16, 16)
    qmodel = bw.calibrate(bw.prepare(model, x, backend=runtime, skip=["2"]), [x])
    file = bw.export(qmodel, tmp_path / "skip.onnx")
    proof = bw.verify(qmodel, file, [x], runtimes=[runtime], latency=False)
    found = proof.runtimes[runtime]
    layers = [o for o in found.floats if o.multiply_adds]
    assert [(o.name.split(",")[0], o.reason) for o in layers] == [("2", "skipped by the rule '2'")]
    assert 0.0 < found.coverage_multiply_adds < 1.0
    assert found.equal > 0.999
    assert proof.ok is True


def test_what_a_runtime_does_not_execute_is_not_believed(cases) -> None:
    """An operator that is marked as integer counts as what was executed."""
    model, file, x = cases["onnxruntime", "residual"]

    class Claims(RUNTIMES.get("onnxruntime")):
        def executed(self, file, feeds):
            return [Executed("Conv", "compute", integer=False, nodes=("stem",), microseconds=1.0)]

    proof = RuntimeProof("claims", "1")
    loaded = OnnxFile.read(file)
    claims = Claims()
    add_coverage(proof, claims, claims.profile(loaded, {}), loaded, bw.ledger_of(model), {"x": x.numpy()})
    assert [(o.name, o.kind, o.integer) for o in proof.operators] == [("stem", "conv2d", False)]
    assert proof.coverage == 0.0
    assert set(proof.unweighed) == {"conv1", "conv2", "fc"}
    assert proof.coverage_multiply_adds is None


def test_multiply_adds_are_those_of_the_shapes(cases) -> None:
    _, file, x = cases["onnxruntime", "residual"]
    loaded = OnnxFile.read(file)
    origins = {o.node: o.name for o in loaded.record.operators}
    work = loaded.multiply_adds({"x": x.numpy()})
    batch, pixels = 4, 16 * 16
    assert {origins[node]: count for node, count in work.items()} == {
        "stem": batch * pixels * 8 * 3 * 9,
        "conv1": batch * pixels * 8 * 8 * 9,
        "conv2": batch * pixels * 8 * 8 * 9,
        "fc": batch * 8 * 4,
    }


def test_recurrent_layers_weigh_what_they_compute(tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(12, 4)
            self.rnn = nn.LSTM(8, 6, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(self.embed(x))[0])

    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    model = bw.calibrate(bw.prepare(Tagger().eval(), x), [x])
    file = bw.export(model, tmp_path / "tagger.onnx")
    found = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    work = 3 * 5 * 2 * 4 * 6 * (8 + 6)
    assert [o.multiply_adds for o in found.operators if o.runs_as == "LSTM"] == [work]
    layers = 3 * 5 * (8 * 8 + 12 * 4)
    assert found.coverage_multiply_adds in (None, pytest.approx(layers / (layers + work)))  # never 100 %
    assert found.coverage < 1.0


def test_operators_that_are_slower_in_integers_are_named() -> None:
    times = {
        "slow": (30.0, 10.0),
        "worse": (90.0, 10.0),
        "close": (10.5, 10.0),
        "fast": (3.0, 9.0),
        "alone": (5.0, None),
    }
    checks = [OperatorCheck(n, "conv2d", True, "Q", "", 0, mine, plain) for n, (mine, plain) in times.items()]
    checks.append(OperatorCheck("float", "conv2d", False, "Conv", "", 0, 9.0, 1.0))
    proof = RuntimeProof("demo", "1", operators=checks)
    assert [o.name for o in proof.slower] == ["worse", "slow"]
    assert proof.slower_words() == "slower than in float: worse (90 µs, not 10 µs), slow (30 µs, not 10 µs)"


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_operators_have_the_times_of_their_float_twins(cases, runtime: str) -> None:
    model, file, x = cases[runtime, "residual"]
    found = bw.verify(model, file, [x], runtimes=[runtime]).runtimes[runtime]
    layers = [o for o in found.operators if o.multiply_adds]
    assert len(layers) == 4
    assert all(o.microseconds >= 0.0 and o.float_microseconds is not None for o in layers)
