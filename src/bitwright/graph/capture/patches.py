"""Patches: what Python and torch do differently while a model is traced.

To torch's C++ code a proxy is not a tensor. Functions that would look into one there are recorded here instead:
functions that create tensors from sizes or take sizes, ``torch.autograd.Function.apply``, functions compiled by
TorchScript.
``isinstance`` and ``callable`` see the value that a proxy carries, and ``len`` of a tensor is a size that stays
symbolic.

They replace the originals while any thread records, and only affect threads that do. Each is optional: if this torch
lacks what one replaces, only that one is left out.
"""

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from bitwright.graph.capture.failures import boundary, call_model
from bitwright.graph.capture.nesting import holds_proxy
from bitwright.graph.capture.proxy import ValueProxy
from bitwright.signals import DelayedSignals
from bitwright.torch_internals import (
    CHECK,
    CHECK_TENSOR,
    NON_REENTRANT_CHECKPOINT,
    find_attribute,
    is_enabled,
    refresh_compiler,
    settle_compiler,
)

_log = logging.getLogger(__name__)
_RANDOM = ("rand", "randn", "randint", "randperm", "normal")
_FACTORIES = (
    *("arange", "range", "linspace", "logspace", "zeros", "ones", "full", "empty", "eye"),
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "tril_indices", "triu_indices", "broadcast_shapes"),
    *("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"),
    *_RANDOM,
)
# Functions whose sizes torch's C++ code turns into numbers before it sees that the tensor is a proxy.
_SIZED = (
    *("reshape", "tile", "broadcast_to", "unflatten", "roll", "narrow", "narrow_copy", "select", "as_strided"),
    *("topk", "kthvalue", "tril", "triu"),
)
_RECORDED = (torch.Tensor, list, dict, set, deque)  # attributes to record when a module is asked for them
_Wrap = Callable[[Any], Any]


class _Thread(threading.local):
    """What this thread is doing: the tracer that records, and the number of captures in progress."""

    tracer: Any = None
    captures = 0

    def recording(self) -> Any:
        """The tracer, unless it is currently computing the value of what it recorded."""
        return None if self.tracer is None or self.tracer.evaluating else self.tracer


_thread = _Thread()


class _Patches:
    """Replacements that stay in place while any thread needs them.

    Signals wait while a thread installs or restores them, since half of either would stay for good.
    """

    def __init__(self, wraps: dict[str, _Wrap]) -> None:
        self.wraps, self.undo = wraps, []
        self.needs: set[tuple[int, object]] = set()  # by thread, each with an object of its own
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_threads)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        need = threading.get_ident(), object()
        try:
            self._change(self.needs.add, need)
            yield
        finally:
            try:
                self._change(self.needs.discard, need)
            finally:  # again, if a signal came before it could be delayed
                self._change(self.needs.discard, need)

    def _change(self, change: Callable[[tuple[int, object]], None], need: tuple[int, object]) -> None:
        with DelayedSignals(), self.lock:
            change(need)
            if not self.needs:
                self._restore()
            elif not self.undo:
                self._install()

    def _forget_threads(self) -> None:
        """Reset in a forked process, where only the thread that forked goes on."""
        self.lock = threading.Lock()
        self.needs = {need for need in self.needs if need[0] == threading.get_ident()}
        if not self.needs:
            self._restore()

    def _install(self) -> None:
        with torch.device("cpu"):  # it remembers torch's constructors when it is first used: these, not ours
            torch.empty(0)
        with _optional("torch.compile"):
            if not settle_compiler():
                self.undo.append(refresh_compiler)
        for path, wrap in self.wraps.items():
            with _optional(path):
                found = find_attribute(path)
                if found is None:
                    raise AttributeError(f"torch {torch.__version__} has no {path}")
                owner, name = found
                own = vars(owner)[name]
                self.undo.append(functools.partial(setattr, owner, name, own))  # first: the process may fork here
                setattr(owner, name, wrap(own))

    def _restore(self) -> None:
        while self.undo:
            with _optional("torch.compile"):
                self.undo[-1]()
            self.undo.pop()


@contextmanager
def capturing() -> Iterator[None]:
    """Make this thread compute attention as in training.

    The fast path of attention for inference rounds differently from the operations that are recorded.
    """
    with _RUN():
        before = _thread.captures
        try:
            _thread.captures = before + 1
            yield
        finally:
            _thread.captures = before


@contextmanager
def recording(tracer: Any) -> Iterator[None]:
    """Show ``tracer`` every call of a module, read of a parameter and new tensor of this thread."""
    with capturing(), _RECORD():
        before = _thread.tracer
        try:
            _thread.tracer = tracer
            yield
        finally:
            _thread.tracer = before


@contextmanager
def _optional(name: str) -> Iterator[None]:
    """Continue without anything that this torch lacks or does not let us replace."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        _say_once(name, str(error))


@functools.cache
def _say_once(path: str, error: str) -> None:
    _log.warning("models that use %s may not be captured: %s", path, error)


def _module_call(own: Any) -> Any:
    @boundary
    @functools.wraps(own)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _thread.recording()
        if tracer is None:
            return own(module, *args, **kwargs)
        return tracer.call_module(module, functools.partial(own, module), args, kwargs)

    return call


def _module_getattr(own: Any) -> Any:
    @boundary
    @functools.wraps(own)
    def read(module: Any, name: str) -> Any:
        value, tracer = own(module, name), _thread.recording()
        if tracer is None or not isinstance(value, _RECORDED):
            return value
        return tracer.read_attribute(module, name, value)

    return read


def _module_setattr(own: Any) -> Any:
    @functools.wraps(own)
    def write(module: Any, name: str, value: Any) -> None:
        if type(value) is ValueProxy and _thread.tracer is not None:
            _thread.tracer.write_attribute(module, name, value)
        call_model(own, module, name, value)

    return write


def _function_apply(own: Any) -> Any:
    function = own.__func__

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _thread.recording()
        if tracer is None or not holds_proxy((args, kwargs)):
            return call_model(function, kind, *args, **kwargs)
        if issubclass(kind, torch.utils.checkpoint.CheckpointFunction):
            called, _, *rest = args
            return call_model(called, *rest)
        return tracer.create_proxy(
            "call_function", _Named(functools.partial(_apply, kind), kind.__name__), args, kwargs
        )

    return classmethod(apply)


def _script_call(own: Any) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _thread.recording()
        if tracer is None or not holds_proxy((args, kwargs)):
            return call_model(own, function, *args, **kwargs)
        return tracer.create_proxy("call_function", _Named(function, function.name), args, kwargs)

    return call


def _autocast_enter(own: Any) -> Any:
    def enter(context: Any) -> Any:
        tracer = _thread.recording()
        if tracer is not None and is_enabled(context):
            raise tracer.refuse("an autocast block cannot be recorded")
        return call_model(own, context)

    return enter


def _checkpoint_generator(own: Any) -> Any:
    """Make a checkpoint just call its function, because it would keep proxies for the backward pass."""

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _thread.tracer is None:
            yield from own(*args, **kwargs)
        else:
            yield

    return generate


def _fastpath_enabled(own: Any) -> Any:
    return lambda: not _thread.captures and own()


def _is_instance(own: Any) -> Any:
    @boundary
    def is_instance(item: Any, kinds: Any, /) -> bool:
        return own(item, kinds) or (type(item) is ValueProxy and own(item.__dict__["_value"], kinds))

    return is_instance


def _is_callable(own: Any) -> Any:
    return lambda item, /: own(item.__dict__["_value"] if type(item) is ValueProxy else item)


def _length(own: Any) -> Any:
    @boundary
    def length(item: Any, /) -> Any:
        if type(item) is ValueProxy:
            value = item.__dict__["_value"]
            return item.shape[0] if isinstance(value, torch.Tensor) and value.ndim else own(item)
        return own(item)

    return length


def _check_with(own: Any) -> Any:
    """Make ``torch._check`` compare in Python: it takes nothing but true booleans."""

    def check(kind: Any, cond: Any, message: Any = None) -> None:
        call_model(own, kind, bool(cond) if type(cond) is ValueProxy else cond, message)

    return check


def _check_tensor(own: Any) -> Any:
    def check(kind: Any, cond: Any, message: Any = None) -> None:
        tracer = _thread.recording()
        if tracer is None or type(cond) is not ValueProxy:
            call_model(own, kind, cond, message)
        else:
            tracer.check_data(cond)

    return check


def _factory(own: Any) -> Any:
    random = own.__name__ in _RANDOM
    return _recorded_if(own, lambda tracer, given: random or tracer.record_all or holds_proxy(given))


def _sized(own: Any) -> Any:
    return _recorded_if(own, lambda _, given: holds_proxy(given))


def _recorded_if(own: Any, wanted: Callable[[Any, Any], bool]) -> Any:
    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        tracer = _thread.recording()
        if tracer is not None and wanted(tracer, (args, kwargs)):
            return tracer.create_proxy("call_function", own, args, kwargs)
        return call_model(own, *args, **kwargs)

    return make


_RUN = _Patches({"torch.backends.mha.get_fastpath_enabled": _fastpath_enabled})
_RECORD = _Patches(
    {
        "torch.nn.Module.__call__": _module_call,
        "torch.nn.Module.__getattr__": _module_getattr,
        "torch.nn.Module.__setattr__": _module_setattr,
        "torch.autograd.Function.apply": _function_apply,
        "torch.autocast.__enter__": _autocast_enter,
        "torch.jit.ScriptFunction.__call__": _script_call,
        NON_REENTRANT_CHECKPOINT: _checkpoint_generator,
        CHECK: _check_with,
        CHECK_TENSOR: _check_tensor,
        **{f"torch.{name}": _factory for name in _FACTORIES},
        **{f"torch.{name}": _sized for name in _SIZED},
        "builtins.isinstance": _is_instance,
        "builtins.callable": _is_callable,
        "builtins.len": _length,
    }
)


@boundary
def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    return kind.apply(*args, **kwargs)


class _Named:
    """A function under a name that fx can write, which is copied with the model, unlike one compiled by TorchScript."""

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
