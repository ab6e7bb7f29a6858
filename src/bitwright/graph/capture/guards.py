"""Guards: what a captured graph relies on beyond its inputs' data, and the nodes that check it.

While a model is traced, Python sometimes needs a number: for an ``if``, a ``range``, a ``len``. The graph then holds
for inputs that yield the same number, and a small node after it raises an error for any others. In
``torch.compile`` the checks are guards of the compiled code.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bitwright.errors import CaptureError, ConfigError
from bitwright.torch_internals import has_side_effect, is_traced

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guard:
    """A number that Python needed while tracing; the graph holds for inputs that yield the same."""

    node: str
    reader: str
    where: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.reader} of {self.node} gave {self.value!r} at {self.where}"


@has_side_effect
def check_input(value: object, captured: object, name: str) -> None:
    """Refuse a number, flag or None other than the one that the model was captured with, which its graph relies on."""
    if isinstance(value, torch.Tensor) or value != captured:
        raise ConfigError(f"the input {name!r} must be {captured!r}, as when the model was captured, not {value!r}")


@has_side_effect
def check_value(value: object, captured: object, reader: str, where: str, module: str = "") -> None:
    """Refuse inputs with sizes for which the user's Python would have done something other than what was recorded."""
    if value != captured:
        raise CaptureError(_other(value, captured, reader, where, module))


@has_side_effect
def check_truth(value: object, captured: bool, reader: str, where: str, module: str = "") -> None:
    """Refuse a number or list whose truth differs from when ``if`` asked."""
    truth = True if value else False  # noqa: SIM210  bool() of a symbolic size stays symbolic in torch.compile
    if truth is not captured:
        raise CaptureError(_other(truth, captured, reader, where, module))


@has_side_effect
def check_length(value: Any, captured: int, reader: str, where: str, module: str = "") -> None:
    """Refuse more or fewer items than the loop over them had when it was recorded."""
    if len(value) != captured:
        raise CaptureError(_other(len(value), captured, reader, where, module))


@has_side_effect
def check_keys(value: Any, captured: list[Any], reader: str, where: str, module: str = "") -> None:
    """Refuse a dict whose keys, or their order, differ from the one that was looped over."""
    if list(value) != captured:
        raise CaptureError(_other(list(value), captured, reader, where, module))


@has_side_effect
def check_text(value: object, captured: object, reader: str, where: str, module: str = "") -> None:
    """Warn if a size that became part of a string has changed: most such strings are only for people."""
    if value != captured:
        _log.warning("%s", _other(value, captured, reader, where, module))


@has_side_effect
def check_data(holds: torch.Tensor, where: str) -> None:
    """Refuse inputs whose data fails a check of the model's own; compiled models and files leave it out."""
    if not is_traced(holds) and not holds.all():
        raise CaptureError(f"the model refuses these inputs: its check of data at {where} fails")


_CHECKS = (check_input, check_value, check_truth, check_length, check_keys, check_text, check_data)


def is_guard(node: fx.Node) -> bool:
    """Whether a node only checks: it reads a value, and nothing reads it."""
    return node.op == "call_function" and node.target in _CHECKS


def _other(value: object, captured: object, reader: str, where: str, module: str) -> str:
    alone = f", or let that module run as written: leaves=['island:{module}']" if module else ""
    return (
        f"these inputs take another path through the model than the example inputs: {reader} at {where} "
        f"gives {value!r}, and gave {captured!r} when the model was captured; capture it with inputs like these{alone}"
    )
