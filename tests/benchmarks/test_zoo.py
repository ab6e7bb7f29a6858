"""The zoo's own machinery: rows survive crashes and interruptions, the summary counts right, weights are sane."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.zoo import round_trip, run
from benchmarks.zoo.families import FAMILIES, Family
from benchmarks.zoo.families.family import image, padding, tokens
from benchmarks.zoo.meter import Meter
from benchmarks.zoo.row import DONE, Row, Step, read_row, row_path
from benchmarks.zoo.table import FLOAT_EXPORT, as_table, summary
from benchmarks.zoo.weights import make_sane

LIMITS = run.Limits(60, 2000)
FAMILY = Family("net", "here", "cnn", nn.Identity, lambda batch: torch.zeros(batch, 3))
START = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.zoo.row import Row
name, folder, *backends = sys.argv[1:]
row = Row(name, "here", "cnn", backends[0], step="verify")
row.write(Path(folder))
(Path(folder) / "started").open("a").write(" ".join(backends) + ";")
"""


def rows_after(monkeypatch, folder, code, limits=LIMITS):
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-c", START + code))
    return run.run_family(FAMILY, run.BACKENDS, folder, folder, limits)


def test_a_crash_is_a_row_and_the_other_backend_gets_another_process(monkeypatch, tmp_path):
    rows = rows_after(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert [row.backend for row in rows] == ["onnxruntime", "openvino"]
    assert all("SIGSEGV" in row.error and row.step == "verify" for row in rows)
    assert (tmp_path / "started").read_text() == "onnxruntime openvino;openvino;"


def test_a_hog_is_ended(monkeypatch, tmp_path):
    rows = rows_after(monkeypatch, tmp_path, "x = bytearray(300_000_000); time.sleep(60)", run.Limits(60, 200))
    assert all("200 MB" in row.error for row in rows)


def test_an_endless_step_is_ended_by_its_computing_time(monkeypatch, tmp_path):
    rows = rows_after(monkeypatch, tmp_path, "while True: pass", run.Limits(0.5, 2000))
    assert all("s in one step" in row.error for row in rows)


def test_finished_rows_are_not_measured_again(monkeypatch, tmp_path):
    Row("net", "here", "cnn", "onnxruntime", step=DONE, gap=1).write(tmp_path)
    Row("net", "here", "cnn", "openvino", step="export").write(tmp_path)  # interrupted
    rows = rows_after(monkeypatch, tmp_path, "row.step = 'done'; row.gap = 7; row.write(Path(folder))")
    assert [row.gap for row in rows] == [1, 7]
    assert (tmp_path / "started").read_text() == "openvino;"


def test_a_row_is_read_as_it_was_written(tmp_path):
    row = Row(
        "net", "here", "cnn", "openvino", steps={"export": Step(2.0, 1.5, 10.0)}, islands={"": "why"}, proven=None
    )
    row.write(tmp_path)
    assert read_row(row_path(tmp_path, "net", "openvino")) == row
    assert read_row(row_path(tmp_path, "net", "onnxruntime")) is None


def test_the_summary_counts_what_the_goals_ask_for():
    cost = {FLOAT_EXPORT: Step(2, 2, 1), "prepare": Step(1, 1, 1), "export": Step(9, 3, 1), "verify": Step(1, 6, 1)}
    good = Row("a", "x", "cnn", "onnxruntime", step=DONE, steps=cost, coverage=1.0, proven=True)
    good.milliseconds, good.float_milliseconds = 1.0, 2.0
    slow = Row("b", "x", "cnn", "onnxruntime", step=DONE, steps=dict(cost), coverage=0.5, proven=False)
    slow.milliseconds, slow.float_milliseconds = 2.0, 1.0
    unknown = Row("c", "x", "cnn", "onnxruntime", step="prepare", error="refused", proven=None)
    text = "\n".join(summary([good, slow, unknown]))
    assert "captured whole: 2 of 3" in text
    assert "exported: 2 of 3" in text
    assert "proven: 1 of 3" in text  # what is not known is not proven
    assert "median: 75%" in text
    assert "slower than float: 1 of 2" in text
    assert "export over torch's: median 1.50" in text
    assert "verify over export: median 2.00" in text
    assert as_table([good, slow, unknown]).row_count == 3


def test_an_island_at_the_root_is_not_captured():
    row = Row("a", "x", "cnn", "onnxruntime", steps={"prepare": Step(1, 1, 1)}, islands={"": "why"})
    assert not row.captured


def test_sane_weights_are_spread_and_keep_the_signal():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 4))
    net[0].weight.data.mul_(1e-4)
    make_sane(net, image(8, 16))
    assert all(float(p.detach().std()) > 0 for p in net.parameters())
    with torch.no_grad():
        normed = net[:2](image(8, 16))
    assert float(net[0].weight.detach().std()) > 1e-2  # all but vanished before
    assert normed.std() == pytest.approx(1.0, abs=0.35)


def test_inputs_are_what_models_expect():
    torch.manual_seed(0)
    assert image(2, 32).shape == (2, 3, 32, 32)
    assert int(tokens(4, 9, 50).min()) >= 5
    assert set(padding(64, 10).sum(1).tolist()) <= set(range(5, 10))
    assert len(FAMILIES) >= 60


def test_memory_of_a_step_is_its_own_peak():
    meter = Meter()
    _, large = meter.measure(lambda: torch.ones(50_000_000).sum())
    _, small = meter.measure(lambda: None)
    assert large.megabytes > 150
    assert small.megabytes < large.megabytes - 100


def tiny():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("changed", [False, True])
def test_a_round_trip_compares_every_output(tmp_path, changed):
    family = Family("tiny", "timm", "mlp", tiny, lambda batch: torch.randn(batch, 3))
    round_trip.save(family, tmp_path)
    if changed:
        tensors = load_file(tmp_path / "expected.safetensors")
        save_file({**tensors, "output.0": tensors["output.0"] + 1e-6}, tmp_path / "expected.safetensors")
    assert round_trip.load(family, tmp_path) == ("outputs [0] differ" if changed else "")


def test_what_a_child_computes_counts():
    code = "import time; print(flush=True)\nwhile time.process_time() < 0.4: pass\nprint(flush=True); input()"

    def work():
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline(), child.stdout.readline()
        return child

    child, alive = Meter().measure(work)
    _, ended = Meter().measure(lambda: work().communicate(b"\n"))
    child.communicate(b"\n")
    assert min(alive.cpu, ended.cpu) >= 0.3
