"""Copy a model much as ``copy.deepcopy`` does, but with less work per module."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from bitwright.graph.capture.failures import call_model
from bitwright.mapped_weights import mapped_again
from bitwright.torch_internals import COMPILED_CALL, users_attributes

_SHARED = (bool, int, float, str, type(None), torch.dtype, torch.Size)


def copy_model(model: nn.Module) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """Copy a model; also return, by the id of each tensor in the copy, the tensor it was copied from."""
    modules = list(model.modules())
    memo = _copied_in_other_ways(modules)
    plain = [module for module in modules if _is_plain(type(module))]
    for module in plain:
        memo[id(module)] = module.__class__.__new__(module.__class__)
    for module in reversed(plain):  # children first: a module that is not plain may look at its copied children
        state = {name: _copied(value, memo) for name, value in module.__dict__.items() if name != COMPILED_CALL}
        call_model(memo[id(module)].__setstate__, state)
    copied = call_model(copy.deepcopy, model, memo)
    return copied, {id(memo[id(t)]): t for t in _tensors(modules) if id(t) in memo}


def _copied_in_other_ways(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Copies, by the id of the original, of tensors with a history and of parameters mapped from a file.

    Tensors that forward computed and kept, as torch.nn.utils.weight_norm does, cannot be copied with their history.
    """
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in _tensors(modules) if not t.is_leaf}
    for parameter in {p for module in modules for p in module._parameters.values() if p is not None}:
        again = mapped_again(parameter)
        if again is not None:
            memo[id(parameter)] = again
    return memo


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The buffers of modules, and tensors that are plain attributes."""
    for module in modules:
        held = (*module._buffers.values(), *(value for _, value in users_attributes(module)))
        yield from (value for value in held if isinstance(value, torch.Tensor))


def _is_plain(kind: type) -> bool:
    """Whether instances of a class are copied by their attributes."""
    if issubclass(kind, torch.jit.ScriptModule) or hasattr(kind, "__deepcopy__"):
        return False
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in own)


def _copied(value: object, memo: dict[int, Any]) -> Any:
    if type(value) in _SHARED:
        return value
    if type(value) in (OrderedDict, dict, set, list) and not value:
        return type(value)()
    if type(value) is dict:
        return {
            name: item if type(item) in _SHARED else call_model(copy.deepcopy, item, memo)
            for name, item in value.items()
        }
    return call_model(copy.deepcopy, value, memo)
