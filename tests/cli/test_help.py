"""Help without torch, the version, the backends, and traces of errors."""

import json
import re

import pytest

from bitwright import __version__
from bitwright.backends.onnxruntime import ONNXRUNTIME
from tests.cli.conftest import python


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"], ["inspect", "-h"], ["backends", "--help"]])
def test_help_has_an_example(arguments):
    process = python("-m", "bitwright", *arguments)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Example: bitwright " in out


def test_the_command_line_needs_neither_torch_nor_rich():
    heavy = "'torch', 'numpy', 'onnx', 'rich', 'yaml'"
    code = f"import sys, bitwright.cli; print([m for m in ({heavy}) if m in sys.modules])"
    out, err = python("-c", code).communicate(timeout=60)
    assert (out, err) == ("[]\n", "")


def test_without_arguments_it_shows_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Usage: bitwright" in out
    assert all(command in out for command in ("quantize", "inspect", "backends"))


def test_version(run):
    assert run("--version") == (0, f"bitwright {__version__}\n", "")


def test_backends_lists_what_exists(run):
    code, out, _ = run("backends")
    assert code == 0
    assert re.search(r"onnxruntime .* uint8 affine tensor +onnxruntime, openvino", out)
    listed = json.loads(run("backends", "--json")[1])["backends"]
    runtimes = {b["name"]: b["runtimes"] for b in listed}
    assert runtimes["onnxruntime"] == ["onnxruntime", "openvino"]
    assert runtimes["openvino"] == ["openvino", "onnxruntime"]


def test_backends_show_has_all_details(run):
    _, out, _ = run("backends", "show", "onnxruntime")
    operators = ONNXRUNTIME.operators
    expected = [*operators.integer, *operators.fused, *operators.reasons.values(), *ONNXRUNTIME.notes]
    assert [detail for detail in expected if detail not in out] == []
    details = json.loads(run("backends", "show", "onnxruntime", "--json")[1])
    assert details["operators"]["integer"] == operators.integer
    assert details["operators"]["fused"] == sorted(operators.fused)
    assert details["operators"]["conditions"] == ["softmax"]
    assert details["weights"]["spec"] == "int7 symmetric narrow channel:0"
    assert json.loads(run("backends", "--json", "show", "onnxruntime")[1]) == details


def test_backends_show_refuses_an_unknown_name(refused):
    assert refused("backends", "show", "opnvino") == "unknown backend 'opnvino': did you mean 'openvino'?"


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_trace(run, before):
    command = ["inspect", "nets:build_broken", "--shape", "1,3,8,8"]
    code, out, err = run(*(["--debug", *command] if before else [*command, "--debug"]))
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert "in build_broken" in err
    assert err.endswith("raised RuntimeError: the checkpoint is missing\n")


def test_debug_by_environment(run, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_DEBUG", "1")
    assert "Traceback" in run("backends", "show", "nope")[2]
    monkeypatch.setenv("BITWRIGHT_DEBUG", "")
    assert "Traceback" not in run("backends", "show", "nope")[2]
