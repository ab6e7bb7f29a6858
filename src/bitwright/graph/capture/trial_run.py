"""Run a model without a trace: always with the same random numbers, and with its state restored."""

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.modes import random_numbers_kept
from bitwright.torch_internals import HOOKS, users_attributes, version_of

_KINDS = ("_modules", "_parameters", "_buffers")
_CONTAINERS = frozenset({list, dict, set, deque})
_UNCHANGED = (bool, int, float, str, type(None), torch.Size, tuple)


@dataclass
class TrialRun:
    """What a run did to a model's state, known afterwards.

    Attributes:
        changed: the modules whose state changed.
        filled: which of their attributes are lists, dicts and the like with other contents.
    """

    changed: set[nn.Module] = field(default_factory=set)
    filled: set[tuple[nn.Module, str]] = field(default_factory=set)


@contextmanager
def trial_run(model: nn.Module, origin: Mapping[int, torch.Tensor] | None = None) -> Iterator[TrialRun]:
    """Restore attributes, buffers, hooks, and the contents of modules' lists and dicts, however the run ends.

    One thread at a time: each run begins from the same random numbers.

    ``origin`` has, by the id of a tensor, another one with its value, so that it need not be copied.
    """
    record = TrialRun()
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    states = [_State(module, origin or {}) for module in modules]
    with random_numbers_kept():
        try:
            yield record
        finally:
            for state in states:
                changed, names = state.restore()
                if changed or names:
                    record.changed.add(state.module)
                    record.filled.update((state.module, name) for name in names)


class _State:
    """The state of one module at one time."""

    __slots__ = ("attributes", "containers", "hooks", "inner", "module", "tensors")

    def __init__(self, module: nn.Module, origin: Mapping[int, torch.Tensor]) -> None:
        self.module = module
        self.attributes = attributes = module.__dict__.copy()
        self.inner = [attributes[kind].copy() for kind in _KINDS]
        own = users_attributes(module)
        self.hooks = {kind: attributes[kind].copy() for kind in HOOKS if attributes.get(kind)}
        self.containers = [(n, *pair) for n, v in own if type(v) in _CONTAINERS for pair in _snapshot(v)]
        held = (*attributes["_buffers"].values(), *dict(own).values())
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        self.tensors = [(t, _place(t), _kept(t, origin)) for t in tensors]

    def restore(self) -> tuple[bool, set[str]]:
        """Restore everything; return whether attributes or tensors had changed, and which containers had."""
        changed = False
        now = self.module.__dict__
        if not (_same(now, self.attributes) and all(map(_same, map(now.__getitem__, _KINDS), self.inner))):
            changed = _differs(now, self.attributes, self.inner)
            now.clear()
            now.update(self.attributes)
            now.update(zip(_KINDS, self.inner, strict=True))
        for kind in HOOKS:
            if kind in self.hooks or now.get(kind):
                _restore(now[kind], self.hooks.get(kind, {}))
        filled = {name for name, container, held in self.containers if _restore(container, held)}
        for tensor, place, value in self.tensors:
            if _place(tensor) != place:
                changed = True
                tensor.data = value.detach().clone()
        return changed, filled


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether a dict has the very same entries, in the same order."""
    same = operator.is_
    return len(now) == len(then) and all(map(same, now, then)) and all(map(same, now.values(), then.values()))


def _kept(tensor: torch.Tensor, origin: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return origin[id(tensor)] if id(tensor) in origin else tensor.clone()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """A key that changes when a tensor is written to or gets other memory."""
    return version_of(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0


def _snapshot(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Each container inside a container, with a copy of what it holds."""
    found = [(value, value.copy())]
    if depth < 3:
        inner = value.values() if isinstance(value, dict) else value
        for item in inner:
            if type(item) in _CONTAINERS:
                found += _snapshot(item, depth + 1)
    return found


def _restore(container: Any, held: Any) -> bool:
    """Restore a container's contents; return whether they had changed."""
    if len(container) == len(held) and all(a is b for a, b in zip(_flat(container), _flat(held), strict=True)):
        return False
    container.clear()
    if isinstance(container, dict | set):
        container.update(held)
    else:
        container.extend(held)
    return True


def _flat(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _differs(now: dict[str, Any], then: dict[str, Any], inner: list[dict[str, Any]]) -> bool:
    """Whether an attribute was set to something else than it was."""
    if now.keys() != then.keys() or any(_unlike(now[k], d) for k, d in zip(_KINDS, inner, strict=True)):
        return True
    for name, value in now.items():
        old = then[name]
        if value is not old and not (isinstance(value, _UNCHANGED) and type(value) is type(old) and value == old):
            return True
    return False


def _unlike(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return now.keys() != then.keys() or any(value is not then[name] for name, value in now.items())
