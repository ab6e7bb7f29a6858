"""Saved models on the command line: quantize --save and --resume, export, evaluate, and all of it under torchrun."""

import json
import signal
import socket
import time

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import QUANTIZE, python

FAST = ("--runtime", "onnxruntime", "--no-latency")
TWELVE = [*QUANTIZE[:3], "nets:twelve_batches", *QUANTIZE[4:], *FAST]


def same_tensors(one, other):
    """Whether two saved models hold the same, to the bit."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return list(a) == list(b) and all(a[name].equal(b[name]) for name in a)


def test_save_export_and_evaluate(run, refused, here):
    code, _, _ = run(*QUANTIZE, *FAST, "--eval", "nets:evaluate", "--save", "saved")
    assert code == 0
    assert not (here / "out" / "checkpoint").exists()
    code, out, _ = run("export", "saved", "-o", "again.onnx", "--json")
    assert code == 0
    assert json.loads(out)["file"] == "again.onnx"
    assert (here / "again.onnx").read_bytes() == (here / "out" / "model.onnx").read_bytes()
    code, out, _ = run("evaluate", "saved", "--json")
    assert code == 0
    assert json.loads(out)["scores"]["samples"] == 64
    code, out, _ = run("evaluate", "saved", "--eval", "nets:evaluate_worse")
    assert code == 0
    assert "0." in out
    assert "exists already" in refused("export", "saved", "-o", "out/model.onnx")
    assert "that differs from what this" in refused(
        "export", "saved", "-o", "m.onnx", "--model", "nets:build_untraceable"
    )


def test_refusals_before_any_work(refused, here):
    assert "is not a saved model" in refused("export", "nowhere", "-o", "m.onnx")
    assert "is not a saved model" in refused("evaluate", ".")
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("mine")
    assert "mine.txt" in refused(*QUANTIZE, "--force", "--save", "full")


def test_a_job_that_fails_keeps_its_calibration(run, here):
    progress = here / "out" / "checkpoint" / "calibration.safetensors"
    code, _, err = run(*QUANTIZE[:3], "nets:broken_data", *QUANTIZE[4:])
    assert (code, err) == (2, "bitwright: --data nets:broken_data raised OSError: disk is gone\n")
    kept = progress.read_bytes()
    code, _, err = run(*QUANTIZE, "--resume", "--skip", "head")
    assert code == 2
    assert "belongs to another model and another recipe; remove it to start over" in err
    assert progress.read_bytes() == kept


@pytest.mark.slow
def test_terminated_and_resumed_and_under_torchrun(run, here):
    """A job that was interrupted, and one on two ranks, give what one that was left alone gives."""
    (here / "slow").touch()
    process = python("-m", "bitwright", *TWELVE)
    deadline = time.monotonic() + 60
    while not (here / "calibrating").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "--resume continues" in err
    assert (here / "out" / "checkpoint" / "calibration.safetensors").exists()
    (here / "slow").unlink()
    assert run(*TWELVE, "--save", "resumed", "--resume")[0] == 0
    assert not (here / "out" / "checkpoint").exists()
    assert run(*TWELVE, "--save", "whole", "--force")[0] == 0
    assert same_tensors(here / "resumed", here / "whole")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m", "bitwright")
    process = python(*torchrun, *TWELVE, "--save", "two", "--force")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("model.onnx") == 1  # one rank speaks
    assert same_tensors(here / "two", here / "whole")
