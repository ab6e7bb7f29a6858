"""``bitwright quantize``: the whole road, JSON, limits, and Ctrl-C."""

import json
import re
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import QUANTIZE, python


def test_quantize_writes_a_file_and_a_report(run, here):
    code, out, _ = run(*QUANTIZE, "--eval", "nets:evaluate", "--backend", "onnxruntime")
    assert code == 0
    assert sorted(p.name for p in (here / "out").iterdir()) == ["model.onnx", "report.html"]
    assert re.search(r"agreement +\S+ +\S+ +\S+", out)
    assert re.search(r"operators in integers +4/5 \(80\.0%\)", out)
    assert "File:   out/model.onnx\nReport: out/report.html\n" in out


def test_quantize_json_is_all_there_is_on_stdout(run, here):
    (here / "out").mkdir()
    (here / "out" / "net.onnx").write_text("an old one")
    arguments = [
        "--eval",
        "nets:evaluate",
        "--name",
        "net.onnx",
        "--force",
        "--runtime",
        "onnxruntime",
    ]
    code, out, err = run(*QUANTIZE[:3], "nets:generated", *QUANTIZE[4:], *arguments, "--no-latency", "--json")
    data = json.loads(out)
    assert code == 0
    assert err == "evaluating\n" * 3
    assert data["ok"] is True
    assert data["missed"] == []
    assert data["file"] == "out/net.onnx"
    assert (here / data["file"]).stat().st_size == data["proof"]["size"]
    assert (here / data["report"]).read_text().startswith("<!")
    assert data["scores"]["float"] == {"agreement": 1.0, "samples": 64.0}
    assert list(data["scores"]["deployed"]) == ["onnxruntime"]
    assert data["proof"]["runtimes"]["onnxruntime"]["coverage"] == 0.8  # the mean runs in float
    assert data["proof"]["runtimes"]["onnxruntime"]["speedup"] is None
    assert data["operators"]["integer"] == 4


def test_quantize_corrects_as_the_recipe_says(run, here):
    (here / "recipe.yaml").write_text("backend: onnxruntime\npreset: W4A8\ncorrect: [bias]\n")
    code, _, _ = run(*QUANTIZE, "--recipe", "recipe.yaml", "--save", "corrected", "--no-latency")
    assert code == 0
    (here / "recipe.yaml").write_text("backend: onnxruntime\npreset: W4A8\ncorrect: []\n")
    code, _, _ = run(*QUANTIZE, "--recipe", "recipe.yaml", "--save", "plain", "--no-latency", "--force")
    assert code == 0
    corrected, plain = (load_file(here / name / "model.safetensors") for name in ("corrected", "plain"))
    assert not torch.equal(corrected["head.bias"], plain["head.bias"])


def test_quantize_tunes_for_speed(run, here):
    code, out, _ = run(*QUANTIZE, "--backend", "onnxruntime", "--tune", "speed", "--no-verify", "--save", "out/saved")
    assert code == 0
    assert "tuned for speed in onnxruntime: " in out
    code, _, err = run(*QUANTIZE, "--tune", "sped", "--force")
    assert code != 0
    assert "tune cannot be 'sped': did you mean 'speed'?" in err


def test_missed_limits_give_exit_code_1(run, here):
    limits = ["--min-coverage", "1", "--min-speedup", "1000", "--max-accuracy-drop", "0.3"]
    arguments = ["--eval", "nets:evaluate_worse", "--runtime", "onnxruntime", "--skip", "head"]
    code, out, _ = run(*QUANTIZE, *arguments, *limits)
    assert code == 1
    missed = [line for line in out.splitlines() if line.startswith("Missed: ")]
    assert len(missed) == 3
    assert "onnxruntime: 60.0% of the executed operators run in integers, less than 100.0%" in missed[0]
    assert "times the speed of FP32, less than 1000.00" in missed[1]
    assert "onnxruntime: score drops by 0.4 (from 0.9 to 0.5), more than 0.3" in missed[2]
    assert re.search(r"head +linear +skipped by the rule 'head'", out)
    assert (here / "out" / "report.html").exists()


def test_scores_must_keep_their_names(run, here):
    code, out, err = run(*QUANTIZE, "--eval", "nets:evaluate_fickle", "--runtime", "onnxruntime")
    assert (code, out) == (2, "")
    assert "evaluate_fickle on the simulation returned loss, but accuracy before" in err
    assert (here / "out" / "model.onnx").exists()  # what was done is not lost


def test_limits_that_are_kept(run):
    limits = ["--min-coverage", "0.8", "--min-equal", "0.99", "--max-gap", "1", "--max-accuracy-drop", "0.4"]
    arguments = [
        "--eval",
        "nets:evaluate_worse",
        "--runtime",
        "onnxruntime",
        "--no-latency",
        "--json",
    ]
    code, out, _ = run(*QUANTIZE, *arguments, *limits)
    assert (code, json.loads(out)["missed"]) == (0, [])


@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_leaves_everything_as_it_was(here, existing):
    if existing:
        (here / "out").mkdir()
        (here / "out" / "model.onnx").write_text("precious")
    command = [*QUANTIZE[:3], "nets:slow_data", *QUANTIZE[4:], "--force"]
    # A background shell ignores SIGINT, and its children inherit that; a terminal does not.
    process = python("-m", "bitwright", *command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 60
    while not (here / "calibrating").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (here / "calibrating").exists()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("bitwright: interrupted: no half-written files were left behind; --resume continues")
    left = {p.name for p in here.rglob("*") if "__pycache__" not in p.parts} - {
        "nets.py",
        "calibrating",
    }
    assert left == {"out", "checkpoint", "calibration.safetensors", *(["model.onnx"] if existing else [])}
    assert not existing or (here / "out" / "model.onnx").read_text() == "precious"
    assert not existing or (here / "out" / "model.onnx").read_text() == "precious"
