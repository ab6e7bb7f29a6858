"""The public surface, and what `import bitwright` costs."""

import json
import subprocess
import sys
from importlib import import_module

import pytest

import bitwright

PUBLIC = [
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
    "export",
    "ledger_of",
    "prepare",
    "register_schedule",
    "report",
    "run_file",
    "swap_modules",
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
    with pytest.raises(AttributeError, match="module 'bitwright' has no attribute 'prepair'"):
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


@pytest.mark.parametrize("name", ["prepare", "calibrate", "export"])
def test_a_function_wins_over_the_module_of_its_name(name):
    code = f"""
import json, bitwright
from bitwright.{name} import {name} as function
import bitwright.{name}
first = bitwright.{name} is function
import sys
print(json.dumps([first, callable(bitwright.{name}), bitwright.{name} is sys.modules["bitwright.{name}"]]))
"""
    assert in_a_fresh_interpreter(code) == [True, True, False]


def test_modules_are_still_found_by_name():
    assert import_module("bitwright.prepare").ledger_of is bitwright.ledger_of
