"""Proxies and tensors inside nested containers and objects."""

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bitwright.graph.capture.objects import vars_of
from bitwright.graph.capture.proxy import ValueProxy

LITERALS = {
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Classes whose values can stand in a graph as they are."""


def holds_proxy(item: object, seen: set[int] | None = None) -> bool:
    """Whether an object, its items or its attributes contain a proxy, at any depth."""
    kind = type(item)
    if kind is ValueProxy:
        return True
    seen = set() if seen is None else seen
    if kind in LITERALS or id(item) in seen or isinstance(item, torch.Tensor | type):
        return False
    seen.add(id(item))
    return any(holds_proxy(part, seen) for part in _parts(item))


def proxies_in(item: object, seen: set[int] | None = None) -> Iterator[ValueProxy]:
    """The proxies in an object, its items or its attributes, at any depth."""
    seen = set() if seen is None else seen
    if type(item) is ValueProxy:
        yield item
    elif id(item) not in seen and holds_proxy(item):
        seen.add(id(item))
        for part in _parts(item):
            yield from proxies_in(part, seen)


def tensors_in(item: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in an object, its items or its attributes, at any depth."""
    seen = set() if seen is None else seen
    if isinstance(item, torch.Tensor):
        yield item
    elif type(item) not in LITERALS and id(item) not in seen:
        seen.add(id(item))
        for part in _parts(item):
            yield from tensors_in(part, seen)


def _parts(item: object) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, tuple | list | set | deque):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (*item.args, *item.keywords.values())
    if not isinstance(item, nn.Module):
        yield from vars_of(item).values()


def plain_tensors(item: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments that are not proxies."""
    kind = type(item)
    if kind is tuple or kind is list:
        for each in item:
            yield from plain_tensors(each)
    elif kind is dict:
        yield from plain_tensors(list(item.values()))
    elif kind is not ValueProxy and isinstance(item, torch.Tensor) and not item.is_inference():
        yield item
