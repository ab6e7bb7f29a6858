"""What Python and torch are made to do while a model is traced, and put back afterwards.

Proxies are no tensors to torch's C++, so what would look into them there is recorded here instead: functions that make
tensors from sizes, ``torch.autograd.Function.apply``, functions compiled by TorchScript. ``isinstance`` answers for
the value a proxy carries. Tried with torch 2.13.
"""

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from bitwright.graph.capture.proxy import ValueProxy

_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)
_FACTORIES = (
    *("arange", "range", "linspace", "logspace", "zeros", "ones", "full", "empty", "eye"),
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "tril_indices", "triu_indices", "broadcast_shapes"),
    *("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"),
    *(f.__name__ for f in _RANDOM),
)


@contextmanager
def patched(tracer: Any) -> Iterator[None]:
    """Let ``tracer`` see every call of a module, every read of a parameter, and all that makes tensors."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, new: Any) -> None:
            own = owner.__dict__[name]
            stack.callback(setattr, owner, name, own)
            setattr(owner, name, new)

        replace(nn.Module, "__call__", _module_call(tracer))
        replace(nn.Module, "__getattr__", _module_getattr(tracer))
        replace(nn.Module, "__setattr__", _module_setattr(tracer))
        replace(torch.autograd.Function, "apply", classmethod(_function_apply(tracer)))
        replace(torch.autocast, "__enter__", _autocast_enter(tracer))
        replace(torch.jit.ScriptFunction, "__call__", _script_call(tracer))
        replace(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _keep_nothing)
        for name in _FACTORIES:
            replace(torch, name, _factory(tracer, getattr(torch, name)))
        replace(builtins, "isinstance", _is_instance(builtins.isinstance))
        yield


def _is_instance(own: Callable[..., bool]) -> Callable[..., bool]:
    def is_instance(item: Any, kinds: Any, /) -> bool:
        return own(item, kinds) or (type(item) is ValueProxy and own(item.__dict__["_value"], kinds))

    return is_instance


def _module_call(tracer: Any) -> Callable[..., Any]:
    own = nn.Module.__call__

    @functools.wraps(own)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tracer.call_module(module, functools.partial(own, module), args, kwargs)

    return call


def _module_getattr(tracer: Any) -> Callable[..., Any]:
    own = nn.Module.__getattr__

    @functools.wraps(own)
    def read(module: nn.Module, name: str) -> Any:
        value = own(module, name)
        return tracer.read_attribute(module, name, value) if isinstance(value, torch.Tensor) else value

    return read


def _module_setattr(tracer: Any) -> Callable[..., Any]:
    own = nn.Module.__setattr__

    @functools.wraps(own)
    def write(module: nn.Module, name: str, value: Any) -> None:
        if type(value) is ValueProxy:
            tracer.write_attribute(module, name, value)
        own(module, name, value)

    return write


def _function_apply(tracer: Any) -> Callable[..., Any]:
    own = torch.autograd.Function.__dict__["apply"].__func__

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating or not holds_proxy((args, kwargs)):
            return own(kind, *args, **kwargs)
        if issubclass(kind, torch.utils.checkpoint.CheckpointFunction):
            function, _, *rest = args
            return function(*rest)
        return tracer.create_proxy("call_function", _Apply(kind), args, kwargs)

    return apply


def _keep_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Let a checkpoint just call its function: what it would keep for the backward pass are proxies."""
    yield


class _Apply:
    """``apply`` of an autograd function, with a name that fx can write."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.__name__ = self.__qualname__ = kind.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


def _script_call(tracer: Any) -> Callable[..., Any]:
    own = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating or not holds_proxy((args, kwargs)):
            return own(function, *args, **kwargs)
        return tracer.create_proxy("call_function", _Script(function), args, kwargs)

    return call


class _Script:
    """A function compiled by TorchScript; unlike it, this can be copied with the model."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.name
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _autocast_enter(tracer: Any) -> Callable[..., Any]:
    own = torch.autocast.__enter__

    def enter(context: Any) -> Any:
        if not tracer.evaluating and context._enabled:
            raise tracer.refuse("an autocast block cannot be recorded")
        return own(context)

    return enter


def _factory(tracer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        if not tracer.evaluating and (tracer.record_all or own in _RANDOM or holds_proxy((args, kwargs))):
            return tracer.create_proxy("call_function", own, args, kwargs)
        return own(*args, **kwargs)

    return make


def holds_proxy(item: Any) -> bool:
    """Whether there is a proxy in any nesting of containers."""
    if type(item) is ValueProxy:
        return True
    if type(item) in (tuple, list):
        return any(map(holds_proxy, item))
    return type(item) is dict and any(map(holds_proxy, item.values()))
