"""The one file that leans on torch's insides: its self-test, and that nothing else does."""

import ast
import subprocess
import sys
from pathlib import Path

import torch

import bitwright
from bitwright import torch_internals

PRIVATE = {"_version", "_enabled", "_forward_hooks", "_forward_pre_hooks", "_non_persistent_buffers_set", "_tracer_cls"}


def test_this_torch_fits():
    assert torch_internals.self_test() == {}


def test_what_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(torch_internals, "version_of", lambda tensor: 0)
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    monkeypatch.delattr(torch.fx.Tracer, "get_fresh_qualname")
    failures = torch_internals.self_test()
    assert failures == {
        "Tensor._version counts writes, through views as well": "it behaves differently",
        "torch.utils.checkpoint wraps functions by a generator": "it behaves differently",
        "fx.Tracer names constants and turns containers of nodes into arguments": (
            "AttributeError: 'Tracer' object has no attribute 'get_fresh_qualname'"
        ),
    }


def test_the_command_prints_every_check():
    command = [sys.executable, "-m", "bitwright.torch_internals"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *checks, last = done.stdout.splitlines()
    assert len(checks) == len(torch_internals._CHECKS) >= 11
    assert all(line.startswith("holds  ") for line in checks)
    assert last == f"torch {torch.__version__}; tried with {', '.join(torch_internals.TRIED)}"


def private_uses(path):
    """Private names of torch that a file reads: ``torch.x._y``, an import of one, or a known private attribute.

    The hooks ``_load_from_state_dict`` and ``_save_to_state_dict`` are there to be overridden.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            of_torch = isinstance(root, ast.Name) and root.id in ("torch", "fx", "nn", "F")
            if node.attr in PRIVATE or (of_torch and not node.attr.endswith("_state_dict")):
                yield node.attr


def test_nothing_else_leans_on_the_insides_of_torch():
    home = Path(bitwright.__file__).parent
    found = {str(path.relative_to(home)): names for path in home.rglob("*.py") if (names := [*private_uses(path)])}
    assert list(found) == ["torch_internals.py"], found
    assert "_version" in found["torch_internals.py"]
