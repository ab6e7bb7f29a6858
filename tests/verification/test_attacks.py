"""Attempts to get an undeserved proof: runtimes that lie, odd limits and batches, results of every type."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, VerifyError
from bitwright.verification import RUNTIMES, Executed, Limits, OutputCheck
from bitwright.verification.outputs import OutputTally, _share


def lie(name, run=None, executed=None):
    """onnxruntime, except for what it reports."""

    class Liar(RUNTIMES.get("onnxruntime")):
        def session(self, file, threads=0, *, as_is=False):
            honest = super().session(file, threads)
            return honest if run is None else lambda feeds: run(honest(feeds))

        def executed(self, file, feeds):
            found = super().executed(file, feeds)
            return found if executed is None else executed(found)

    Liar.name = name
    RUNTIMES.register(name, override=True)(Liar)
    return name


def each(change):
    return lambda results: {name: change(value) for name, value in results.items()}


LIES = {
    "nothing": (lambda results: None, "returned NoneType for the outputs"),
    "a list": (lambda results: list(results.values()), "returned list for the outputs"),
    "lists": (each(np.ndarray.tolist), r"returned list for \w+, not an array of numbers"),
    "objects": (each(lambda v: v.astype(object)), r"returned object for \w+, not an array"),
    "texts": (each(lambda v: v.astype(str)), r"returned <U\d+ for \w+, not an array"),
    "tensors": (each(torch.from_numpy), r"returned Tensor for \w+, not an array"),
}


@pytest.mark.parametrize("kind", LIES)
def test_runtime_that_gives_no_arrays(several, kind: str) -> None:
    model, file, x = several
    run, message = LIES[kind]
    with pytest.raises(VerifyError, match=message):
        bw.verify(model, file, [x], runtimes=[lie("liar", run)], latency=False)


WRONG = {
    "floats for integers": (each(lambda v: v.astype(np.float32)), "exposes it as float32, not as integers"),
    "fractions": (each(lambda v: v + 0.4 if v.dtype.kind in "iu" else v), "not as integers"),
    "integers that wrap": (
        each(lambda v: v.astype(np.int64) + 2**32 if v.dtype.kind in "iu" else v),
        "4294967296 steps",
    ),
    "doubles": (each(lambda v: v.astype(np.float64) if v.dtype.kind == "f" else v), "has the type torch.float64"),
    "other shapes": (each(np.ravel), "has the shape [64], in the simulation [16, 4]"),
    "nothing at all": (lambda results: {}, "is missing in the file"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_runtime_that_gives_other_arrays(several, kind: str) -> None:
    model, file, x = several
    run, message = WRONG[kind]
    proof = bw.verify(model, file, [x], runtimes=[lie("liar", run)], latency=False)
    assert proof.ok is False
    assert any(message in line for line in proof.missed), proof.missed


def test_runtime_that_stops_giving_tensors_out(several) -> None:
    model, file, x = several
    runs = []

    def only_at_first(results):
        runs.append(results)
        return results if len(runs) < 4 else {n: v for n, v in results.items() if v.dtype.kind == "f"}

    proof = bw.verify(model, file, [x, x], runtimes=[lie("liar", only_at_first)], latency=False)
    assert proof.ok is False
    assert any("the runtime does not expose it" in line for line in proof.missed)


def test_runtime_that_does_not_tell_what_it_executed(several) -> None:
    model, file, x = several
    with pytest.raises(VerifyError, match="reported NoneType for what it executed"):
        bw.verify(model, file, [x], runtimes=[lie("liar", executed=lambda found: None)], latency=False)
    silent = bw.verify(
        model, file, [x], runtimes=[lie("liar", executed=lambda found: [])], latency=False, limits={"coverage": 0.0}
    )
    assert silent.missed == ["liar: not measured: the share of the executed operators run in integers"]


def test_runtime_that_hides_operators(several) -> None:
    """One operator in integers is not all of them, if the runtime does not mention some layers."""
    model, file, x = several
    one = [Executed("QGemm", "compute", integer=True, microseconds=1.0)]
    proof = bw.verify(
        model, file, [x], runtimes=[lie("liar", executed=lambda found: one)], latency=False, limits={"coverage": 1.0}
    )
    assert proof.ok is False


@pytest.mark.parametrize("value", [math.nan, -1, "1", True])
@pytest.mark.parametrize("name", ["largest", "uncompared", "output_local", "coverage"])
def test_limit_that_limits_nothing_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the limit {name} must be a number of at least 0, or None"):
        Limits.parse({name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"limits": limits}, "limits must be a dict such as") for limits in ("strict", 5, [("largest", 1)])),
        *(({"timeout": seconds}, "number of seconds above 0") for seconds in (0, -1, math.nan, math.inf, "5", True)),
        *(({"runtimes": names}, "name at least one runtime") for names in (5, [], [5])),
    ],
)
def test_odd_settings_are_refused(several, given: dict[str, object], message: str) -> None:
    model, file, x = several
    with pytest.raises(ConfigError, match=message):
        bw.verify(model, file, [x], latency=False, **given)


def test_threads_verify_one_model_and_others_run_the_file(several) -> None:
    model, file, x = several
    expected = bw.run_file(file)(x)[0]
    with ThreadPoolExecutor(3) as pool:
        proofs = [pool.submit(bw.verify, model, file, [x], runtimes="onnxruntime", latency=False) for _ in range(2)]
        runs = [pool.submit(lambda: bw.run_file(file)(x)[0]) for _ in range(4)]
        assert all(proof.result().ok for proof in proofs)
        assert all(torch.equal(run.result(), expected) for run in runs)


def test_limits_of_nothing_judge_nothing(several) -> None:
    model, file, x = several
    none = dict.fromkeys(("largest", "uncompared", "output_local", "output_steps", "weights", "changes"))
    assert bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False, limits=none).ok is None


def test_batches_that_are_empty_or_of_another_kind(several) -> None:
    model, file, x = several

    def judged(*batches):
        return bw.verify(model, file, batches, runtimes=["onnxruntime"], latency=False)

    empty = judged(x[:0])
    assert empty.ok is False
    assert any("has no values" in line for line in empty.missed)
    for batch in (x.double(), x.half(), x.bfloat16(), x.long(), x[:, :5], x[None], None, "x", {"y": x}):
        with pytest.raises(VerifyError):
            judged(batch)
    everywhere = torch.full_like(x, math.nan)
    assert judged(everywhere).ok is False or judged(everywhere).runtimes["onnxruntime"].outputs[0].largest == 0.0


class Infinite(nn.Module):
    def forward(self, x):
        return torch.log(x)


def test_noise_that_is_not_finite_excuses_nothing(monkeypatch) -> None:
    """One value that noise makes infinite must not be the unit in which all others are small."""
    x = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    tally = OutputTally(["y"], set())
    monkeypatch.setattr(tally, "_noise", lambda *_: [0.01])
    monkeypatch.setattr("bitwright.verification.outputs.rounding_by", None)
    tally.add(Infinite(), bw.graph.Inputs((x,)), {"y": np.log(x.numpy()) + 0.5}, torch.log(x))
    (check,) = tally.checks()
    assert check.steps == pytest.approx(50.0, rel=1e-4)
    assert check.local > 0.1


def test_noise_counts_where_it_is_finite(several) -> None:
    model, _, x = several
    tally = OutputTally(["a"], set())

    class Logged(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            y = self.model(x)["one"]
            return 1.0 / (y - y.min().floor() - (y - y.min()).clamp(max=0))

    (noise,) = tally._noise(Logged(), bw.graph.Inputs((x,)), [torch.full((16, 4), 0.0)])
    assert math.isfinite(noise)


def test_small_channels_do_not_hide_behind_large_ones() -> None:
    ours = torch.cat([torch.rand(100, 2) * 640, torch.rand(100, 4)], 1)
    gap = torch.zeros_like(ours)
    gap[7, 3] = 0.5  # of a probability
    assert float(gap.max() / ours.max()) < 1e-3
    assert _share(gap, ours) > 1e-2
    assert _share(gap.t(), ours.t()) > 1e-2


def test_one_large_batch_does_not_hide_a_small_one(several) -> None:
    class Same(nn.Module):
        def forward(self, x):
            return x

    tally = OutputTally(["y"], set())
    for size, gap in ((1e6, 0.0), (1.0, 0.1)):
        x = torch.full((4, 4), size)
        tally.add(Same(), bw.graph.Inputs((x,)), {"y": x.numpy() + np.float32(gap)}, x)
    (check,) = tally.checks()
    assert isinstance(check, OutputCheck)
    assert check.relative == pytest.approx(0.1)
    assert check.local == pytest.approx(0.1)


class Results(nn.Module):
    """Beside a tensor, what no file can hold."""

    def __init__(self, extra) -> None:
        super().__init__()
        self.fc, self.extra = nn.Linear(8, 4), extra

    def forward(self, x):
        y = self.fc(x)
        return {"y": y, "class": y.argmax(-1), "is": y > 0, "extra": self.extra, "none": None}


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_results_that_are_no_tensors_are_named(tmp_path, runtime: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = bw.calibrate(bw.prepare(Results(2.5).eval(), x), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x], runtimes=[runtime], latency=False)
    assert proof.ok is True
    assert len(proof.runtimes[runtime].outputs) == 3
    (note,) = proof.runtimes[runtime].notes[-1:]
    assert note == "the file returns only tensors; of what the model returns, it lacks 2.5"
