"""tune_speed: what is slower in integers stays float, only if the file as a whole gains and is proven."""

from collections.abc import Callable, Iterator

import pytest
import torch

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.tuning import SpeedTuning
from bitwright.verification.proof import Proof
from bitwright.verification.runtimes.base import RUNTIMES, Executed
from tests.tuning.nets import Attention, Separable, Table, TableRuntime

Timed = Callable[[Table], str]


@pytest.fixture
def timed() -> Iterator[Timed]:
    """Register a runtime that takes the times of a table, and give its name."""

    def make(table: Table) -> str:
        made = type("Timed", (TableRuntime,), {"table": staticmethod(table), "seen": {}, "name": "timed"})
        RUNTIMES.register("timed", override=True)(made)
        return "timed"

    yield make
    if "timed" in RUNTIMES:
        RUNTIMES.unregister("timed")


def _tuned(net: torch.nn.Module, shape: tuple[int, ...], runtime: str, **more: object) -> SpeedTuning:
    torch.manual_seed(0)
    return bw.tune_speed(net.eval(), torch.randn(shape), "onnxruntime", runtime=runtime, **more)  # pyrefly: ignore


def _slow_depthwise(operator: Executed) -> float:
    if operator.role != "compute" or operator.runs_as == "Max":  # a guard
        return 1.0 if operator.role == "conversion" else 0.0
    if not operator.integer:
        return 10.0
    return 40.0 if "depth" in operator.nodes else 4.0


def test_only_the_operator_that_loses_is_left_float(timed):
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(_slow_depthwise))
    assert [(o.name, o.operator, o.microseconds, o.float_microseconds) for o in tuning.left_float] == [
        ("depth", "conv2d", 40.0, 10.0)
    ]
    assert tuning.float_ms == pytest.approx(0.030)
    assert tuning.before_ms == pytest.approx(0.050)  # 4 + 40 + 4, and conversions at both ends
    assert tuning.after_ms == pytest.approx(0.022)  # 4 + 10 + 4, and two conversions more
    assert [(r.match, r.skip) for r in tuning.recipe.rules] == [("node:depth", True)]
    model = bw.prepare(Separable().eval(), torch.randn(1, 3, 8, 8), recipe=tuning.recipe)
    verdicts = {e.name: e.verdict.value for e in bw.ledger_of(model).entries}
    assert (verdicts["stem"], verdicts["depth"], verdicts["point"]) == ("integer", "float", "integer")
    assert "depth (40 µs, not 10 µs)" in str(tuning)


def test_a_file_that_gains_everywhere_is_left_alone(timed):
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(lambda e: 1.0 if e.integer or e.role != "compute" else 9.0))
    assert (tuning.left_float, tuning.recipe.rules) == ((), ())
    assert tuning.after_ms == tuning.before_ms < tuning.float_ms
    assert "unchanged" in str(tuning)


def test_conversions_count(timed):
    """Integer layers gain 2 µs each, but the conversions at the ends cost 20."""
    table = {"conversion": 10.0, "movement": 0.0}
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(lambda e: table.get(e.role, 8.0 + 2 * (not e.integer))))
    assert {o.name for o in tuning.left_float} <= {"stem", "depth", "point"}
    assert any("no choice of layers makes this file as fast as float" in note for note in tuning.notes)


def test_what_the_user_asks_for_is_kept(timed):
    rules = [{"match": "depth", "weight": {"bits": 6}}]
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(_slow_depthwise), recipe={"rules": rules})
    assert [r.match for r in tuning.recipe.rules] == ["depth"]
    assert tuning.left_float == ()


def test_a_file_that_is_not_proven_is_not_kept(timed, monkeypatch):
    missed = Proof("", 1, 1, missed=["largest gap 3 steps"])
    monkeypatch.setattr("bitwright.tuning.speed.verify", lambda *_, **__: missed)
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(_slow_depthwise))
    assert (tuning.left_float, tuning.recipe.rules) == ((), ())
    assert tuning.notes[1] == "a faster file was not kept because it was not verified: largest gap 3 steps"


def test_the_fastest_file_that_is_proven_is_kept(timed, monkeypatch):
    """Without ``point`` in integers too, the file is faster still, but that one is not proven."""

    def table(operator: Executed) -> float:
        return 9.5 if operator.integer and "point" in operator.nodes else _slow_depthwise(operator)

    both = _tuned(Separable(), (1, 3, 8, 8), timed(table))
    assert {o.name for o in both.left_float} == {"depth", "point"}
    proofs = iter([Proof("", 1, 1, missed=["largest gap 3 steps"]), Proof("", 1, 1)])
    monkeypatch.setattr("bitwright.tuning.speed.verify", lambda *_, **__: next(proofs))
    tuning = _tuned(Separable(), (1, 3, 8, 8), timed(table))
    assert {o.name for o in tuning.left_float} == {"depth"}
    assert both.after_ms < tuning.after_ms < tuning.before_ms


@pytest.mark.parametrize("integer_product", [1.0, 100.0])
def test_attention_is_in_integers_where_that_is_faster(timed, integer_product):
    def table(operator: Executed) -> float:
        if "MatMul" in operator.runs_as or operator.runs_as == "QGemm":
            named = any("into" in n or "out" in n for n in operator.nodes)
            return 5.0 if named else integer_product if operator.integer else 30.0
        return 0.1

    tuning = _tuned(Attention(), (1, 12, 16), timed(table))
    assert tuning.decomposed is (integer_product < 30.0)
    assert tuning.recipe.schedules == ({"decompose_attention": True} if tuning.decomposed else {})
    assert ("attention computes in integers" in str(tuning)) is tuning.decomposed


def test_attention_that_costs_accuracy_stays_float(timed, monkeypatch):
    heard = iter([40.0, 30.0])
    monkeypatch.setattr("bitwright.tuning.trial.Trial.decibels", lambda _: next(heard))
    tuning = _tuned(Attention(), (1, 12, 16), timed(lambda e: 1.0 if e.integer else 30.0))
    assert not tuning.decomposed
    assert tuning.notes[1] == "attention stays float: in integers, it costs 10.0 dB on the example inputs"


def test_prepare_tunes_and_the_file_is_proven(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = bw.prepare(Separable().eval(), x, "onnxruntime", tune="speed")
    ledger = bw.ledger_of(model)
    assert any(note.startswith("tuned for speed in onnxruntime: ") for note in ledger.notes)
    if any(e.verdict.value == "integer" for e in ledger.entries):
        file = bw.export(bw.calibrate(model, [x]), tmp_path / "tuned.onnx")
        assert bw.verify(model, file, [x], runtimes=["onnxruntime"]).ok


def test_refusals():
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ConfigError, match=r"tune cannot be 'sped': did you mean 'speed'\?"):
        bw.prepare(Separable().eval(), x, tune="sped")
    with pytest.raises(ConfigError, match="nothing does for nnie"):
        bw.prepare(Separable().eval(), x, "nnie", tune="speed")
    with pytest.raises(ConfigError, match="found nothing to quantize"):
        bw.prepare(Separable().eval(), x, skip=["*"], tune="speed")
