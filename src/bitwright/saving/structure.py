"""A model's computation beyond its tensors, line by line, to compare a rebuilt model with the saved one."""

import contextlib
import difflib
import hashlib
import inspect
from dataclasses import fields

from torch import nn

from bitwright.exporting.fingerprint import text_of
from bitwright.exporting.modules import qualified_name
from bitwright.graph import CapturedModel
from bitwright.graph.expression import Expression
from bitwright.graph.model import users_class
from bitwright.nn.fold import Fold
from bitwright.nn.layer import QuantLayer
from bitwright.quantizer import TensorQuantizer, quantizers

_SHOWN = 3  # differences that a message lists
_WIDTH = 200  # letters of a line that a message shows


def structure(model: nn.Module) -> list[str]:
    """Every module with its settings and every call of every graph; quantizers only by name."""
    lines: list[str] = []
    inside = tuple(f"{name}." for name in quantizers(model))
    for path, module in model.named_modules():
        if not path.startswith(inside):
            lines += _lines(path or "(model)", module)
    return lines


def _lines(path: str, module: nn.Module) -> list[str]:
    if isinstance(module, TensorQuantizer):
        return [f"{path}: quantizer"]
    if isinstance(module, CapturedModel):
        calls = [(n, qualified_name(n.target) if callable(n.target) else n.target) for n in module.graph.nodes]
        return [
            f"{path}: {users_class(module).__qualname__}, captured",
            *(f"{path}: {n.name} = {n.op} {target} {text_of(n.args)} {text_of(n.kwargs)}" for n, target in calls),
        ]
    settings = ""
    with contextlib.suppress(Exception):  # the user's own extra_repr
        settings = " ".join(module.extra_repr().split())
    lines = [f"{path}: {type(module).__qualname__}({settings})"]
    if isinstance(module, QuantLayer):
        lines.append(f"{path}: int32 bias {module.quantize_bias}")
        lines += [f"{path}: before {_fold(fold)}" for fold in module.before]
        lines += [f"{path}: after {_fold(fold)}" for fold in module.after]
    return lines


def _fold(fold: Fold) -> str:
    values = [getattr(fold, field.name) for field in fields(fold)]
    return f"{type(fold).__name__} {', '.join(map(_fold_value, values))}"


def _fold_value(value: object) -> str:
    if isinstance(value, Fold):
        return _fold(value)
    if isinstance(value, Expression):
        return " ".join(text_of(target) for _, target, _, _ in value.steps)
    return type(value).__qualname__ if isinstance(value, nn.Module) else text_of(value)


def differences(saved: list[str], made: list[str]) -> list[str]:
    """The first lines in which two structures differ, for people."""
    if saved == made:
        return []
    start = next((i for i, (a, b) in enumerate(zip(saved, made, strict=False)) if a != b), min(len(saved), len(made)))
    here = (saved[start : start + 200], made[start : start + 200])  # difflib is quadratic
    found = [line for line in difflib.unified_diff(*here, lineterm="", n=0) if line[:3] not in ("---", "+++", "@@ ")]
    named = {"-": "was", "+": "is now"}
    shown = [f"{named[line[0]]} {line[1 : _WIDTH + 1]!r}" for line in found if line[0] in named]
    return shown[: 2 * _SHOWN] or [f"{len(saved)} lines, now {len(made)}"]


def code_of(model: nn.Module) -> dict[str, str]:
    """A digest of the source of each user class among the model's modules, if there is a source."""
    found: dict[str, str] = {}
    for kind in {users_class(module) for module in model.modules()}:
        if kind.__module__.split(".")[0] not in ("torch", "bitwright"):
            with contextlib.suppress(OSError, TypeError):
                source = inspect.getsource(kind)
                found[f"{kind.__module__}.{kind.__qualname__}"] = hashlib.sha256(source.encode()).hexdigest()[:16]
    return dict(sorted(found.items()))
