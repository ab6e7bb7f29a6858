"""Layers whose hooks change what they read or return: no quantized layer could take their place."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from bitwright.graph.capture.islands import is_single
from bitwright.graph.capture.nesting import plain_tensors
from bitwright.torch_internals import has_hooks, version_of

CHANGED = "because its hooks change what it reads or returns"


@contextmanager
def changed_by_hooks(model: nn.Module) -> Iterator[set[str]]:
    """Inside, note the layers whose hooks return other values than they receive, or write into them."""
    changed: set[str] = set()
    with ExitStack() as undo:
        for path, module in model.named_modules():
            if path and is_single(module) and has_hooks(module):
                for handle in _watch(path, module, changed):
                    undo.callback(handle.remove)
        yield changed


def _watch(path: str, module: nn.Module, changed: set[str]) -> Iterator[Any]:
    """Look at what a layer is given and returns before its hooks and after them."""
    given: list[Any] = []
    returned: list[Any] = []

    def compare(before: list[Any], now: object) -> None:
        if before and before.pop() != _state(now):
            changed.add(path)

    def arrives(_: nn.Module, args: object, kwargs: object) -> None:
        given[:] = [_state((args, kwargs))]

    def leaves(_: nn.Module, args: object, result: object) -> None:
        returned[:] = [_state(result)]

    yield module.register_forward_pre_hook(arrives, prepend=True, with_kwargs=True)
    yield module.register_forward_pre_hook(lambda _, a, k: compare(given, (a, k)), with_kwargs=True)
    yield module.register_forward_hook(leaves, prepend=True)
    yield module.register_forward_hook(lambda _, a, result: compare(returned, result))


def _state(value: object) -> list[tuple[int, int]]:
    """Which tensors a value holds, and how often they were written to."""
    return [(id(tensor), version_of(tensor)) for tensor in plain_tensors(value)]
