"""The public surface, and what `import bitwright` costs."""

import json
import subprocess
import sys
from importlib import import_module

import pytest

import bitwright

PUBLIC = [
    "BitwrightError",
    "InputMatchType",
    "MatcherNode",
    "QuantDescriptor",
    "QuantSpec",
    "Recipe",
    "ReplacePatternBase",
    "ReplaceStrategy",
    "Rule",
    "TensorQuantizer",
    "analyze",
    "calibrate",
    "calibrate_by_block",
    "correct",
    "correct_bias",
    "correct_bias_analytically",
    "equalize",
    "explain_capture",
    "export",
    "fit_weight_ranges",
    "float_state_dict",
    "freeze_batchnorm",
    "gptq",
    "ledger_of",
    "load",
    "map_weights",
    "plan",
    "prepare",
    "reconstruct",
    "reestimate_norms",
    "register_schedule",
    "report",
    "run_file",
    "save",
    "search_bits",
    "sensitivity",
    "simulate",
    "smooth",
    "swap_modules",
    "train",
    "tune_speed",
    "unfreeze_batchnorm",
    "verify",
]
HEAVY = [
    "torch",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "transformers",
    "rich",
    "typer",
    "pydantic",
    "yaml",
    "sklearn",
]


def in_a_fresh_interpreter(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_public_surface():
    assert bitwright.__all__ == PUBLIC
    assert bitwright.__version__ == "0.1.0"
    assert set(PUBLIC) <= set(dir(bitwright))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    found = getattr(bitwright, name)
    assert callable(found)
    assert found.__doc__
    assert getattr(bitwright, name) is found


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'bitwright' has no attribute 'prepair'; did you mean 'prepare'"):
        _ = bitwright.prepair


def test_importing_bitwright_imports_nothing_heavy():
    loaded = in_a_fresh_interpreter(
        f"import bitwright, json, sys; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    assert loaded == []


def test_preparing_and_calibrating_need_no_runtime():
    code = """
import json, sys, torch, bitwright as bw
model = bw.prepare(torch.nn.Linear(2, 2), torch.randn(1, 2))
bw.calibrate(model, [torch.randn(3, 2)])
names = ["onnx", "onnxruntime", "onnxscript", "openvino", "transformers", "rich", "sklearn"]
print(json.dumps([m for m in names if m in sys.modules]))
"""
    assert in_a_fresh_interpreter(code) == []


def test_no_public_name_shadows_a_module():
    code = """
import importlib, json, pkgutil, bitwright
names = [m.name for m in pkgutil.iter_modules(bitwright.__path__)]
print(json.dumps([n for n in bitwright.__all__ if n in names]))
"""
    assert in_a_fresh_interpreter(code) == []


@pytest.mark.parametrize(
    "name", ["exporting.pipeline", "verification.pipeline", "preparation.pipeline", "graph.capture.run"]
)
def test_every_module_can_be_imported_under_a_name(name):
    code = f"""
import json, bitwright as bw
bw.prepare, bw.calibrate, bw.export, bw.verify, bw.report, bw.analyze
import bitwright.{name} as module
print(json.dumps(module.__name__))
"""
    assert in_a_fresh_interpreter(code) == f"bitwright.{name}"


def test_modules_are_still_found_by_name():
    assert import_module("bitwright.preparation").ledger_of is bitwright.ledger_of
