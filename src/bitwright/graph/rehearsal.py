"""Run a model as if it had not been run: always the same random numbers, and its state is put back."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_OWN = frozenset(nn.Module().__dict__)  # what torch keeps in every module
_KINDS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
_UNCHANGED = (bool, int, float, str, type(None), torch.Size, tuple)


@dataclass
class Rehearsal:
    """What a run did to a model's state, known once it is over."""

    changed: set[nn.Module] = field(default_factory=set)


@contextmanager
def rehearsal(model: nn.Module) -> Iterator[Rehearsal]:
    """Put back attributes, buffers, and what lists and dicts of modules hold, however the run ends."""
    record = Rehearsal()
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(m, {**m.__dict__, **{k: m.__dict__[k].copy() for k in _KINDS}}) for m in modules]
    containers = [(m, _snapshot(v)) for m in modules for k, v in m.__dict__.items() if _is_own(k, v)]
    tensors = [(m, t, _place(t), t.clone()) for m in modules for t in _tensors(m)]
    with torch.random.fork_rng(devices=[]):
        try:
            yield record
        finally:
            for module, state in before:
                if _differs(module.__dict__, state):
                    record.changed.add(module)
                module.__dict__.clear()
                module.__dict__.update(state)
            for module, snapshots in containers:
                if sum(_restore(*each) for each in snapshots):
                    record.changed.add(module)
            with torch.no_grad():
                for module, tensor, place, value in tensors:
                    if _place(tensor) != place:
                        record.changed.add(module)
                        tensor.data = value


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """The buffers and plain tensors of a module, which its forward may write to."""
    return [t for t in (*module._buffers.values(), *module.__dict__.values()) if isinstance(t, torch.Tensor)]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or is given other memory."""
    return tensor._version, tensor.data_ptr()


def _is_own(name: str, value: Any) -> bool:
    return name not in _OWN and isinstance(value, list | dict | set | deque)


def _snapshot(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Each container inside a container, with a copy of what it holds."""
    found = [(value, value.copy())]
    if depth < 3:
        inner = value.values() if isinstance(value, dict) else value
        for item in inner:
            if isinstance(item, list | dict | set | deque):
                found += _snapshot(item, depth + 1)
    return found


def _restore(container: Any, held: Any) -> bool:
    """Let a container hold what it held; say whether that had changed."""
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


def _differs(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether an attribute was set, or set anew."""
    if now.keys() != then.keys():
        return True
    for name, value in now.items():
        old = then[name]
        if name in _KINDS:
            if len(value) != len(old) or any(a is not b for a, b in zip(_flat(value), _flat(old), strict=True)):
                return True
        elif value is not old and not (isinstance(value, _UNCHANGED) and type(value) is type(old) and value == old):
            return True
    return False
