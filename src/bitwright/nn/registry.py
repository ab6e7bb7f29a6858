"""Which QModule serves which source: ``register_qmodule`` and its look-ups."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

from bitwright.errors import ConfigError, suggest
from bitwright.registry import describe, load_plugins

QMODULES: dict[Any, type[nn.Module]] = {}
_REPLACED: dict[Any, list[type[nn.Module]]] = {}
_FOR_NOW: ContextVar[Mapping[Any, type[nn.Module]]] = ContextVar("qmodules_for_now", default={})  # noqa: B039
C = TypeVar("C", bound=type)


def register_qmodule(sources: Iterable[Any], *, override: bool = False) -> Callable[[C], C]:
    """Register a QModule class for the modules, functions and tensor methods (by name) that it replaces.

    ::

        @register_qmodule(sources=[nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d], override=True)
        class QAdaptiveAvgPool2d(QuantOpr): ...

    Args:
        sources: module classes, functions, and names of tensor methods.
        override: take over sources from the class that has them. Bitwright's own classes that only quantize an input
            (pools, activations, sums …) can be replaced without it.
    """
    wanted = [sources] if isinstance(sources, str) or callable(sources) else list(sources)
    if not wanted:
        raise ConfigError("register_qmodule needs at least one source: a module class, a function or a method's name")
    for source in wanted:
        if getattr(source, "builds_itself", False):
            raise ConfigError(
                f"say what {describe(source)} replaces: @register_qmodule(sources=[nn.Conv2d]), for example"
            )
        if isinstance(source, str) and not hasattr(Tensor, source):
            raise ConfigError(f"{source!r} is no method of a tensor{suggest(source, dir(Tensor))}")
        if not isinstance(source, str) and not callable(source):
            raise ConfigError(
                f"a source must be a module class, a function or the name of a tensor method, not {source!r}"
            )

    def decorate(cls: C) -> C:
        if not issubclass(cls, nn.Module):
            raise ConfigError(
                f"{cls.__qualname__} is not an nn.Module: derive it from QuantOpr, or a module and a mixin"
            )
        for source in wanted:
            taken = QMODULES.get(source)
            if taken is not None and not override and not _gives_way(taken):
                raise ConfigError(
                    f"{_name(source)} is registered twice: by {describe(taken)} and by {describe(cls)}; "
                    "pass override=True to replace the first"
                )
        for source in wanted:
            if source in QMODULES:
                _REPLACED.setdefault(source, []).append(QMODULES[source])
            QMODULES[source] = cls
        return cls

    return decorate


def unregister_qmodule(cls: type[nn.Module]) -> None:
    """Unregister a class; the class that it replaced serves its sources again."""
    sources = [source for source, found in QMODULES.items() if found is cls]
    if not sources:
        raise ConfigError(f"{describe(cls)} is not registered")
    for source in sources:
        before = _REPLACED.pop(source, [])
        if before:
            QMODULES[source] = before.pop()
            _REPLACED[source] = before
        else:
            del QMODULES[source]


def qmodule_for(source: object) -> type[Any] | None:
    """The class that serves a module class, function or method name, if any."""
    load_plugins()
    found = _FOR_NOW.get().get(source) or QMODULES.get(source)
    base = torch_base(source) if found is None and isinstance(source, type) else source
    return found if base is source else qmodule_for(base)


_HARMLESS = frozenset(
    {*vars(type("_", (), {})), "__init__", "__repr__", "extra_repr", "reset_parameters", "__annotations__"}
)


@functools.cache
def torch_base(kind: type) -> type:
    """The torch class that computes the same, for a subclass that overrides nothing of it, or ``kind`` itself."""
    own = [*itertools.takewhile(lambda cls: not cls.__module__.startswith("torch."), kind.__mro__)]
    base = kind.__mro__[len(own)] if own and len(own) < len(kind.__mro__) else kind
    if base in (kind, nn.Module) or not base.__module__.startswith("torch.nn.modules"):
        return kind
    names = {name for cls in own for name in vars(cls)} - _HARMLESS
    return kind if any(hasattr(base, name) for name in names) or names & {"weight", "bias"} else base


@contextmanager
def serving(classes: Mapping[Any, type[nn.Module]]) -> Iterator[None]:
    """Temporarily serve some sources with other classes, without registering anything."""
    token = _FOR_NOW.set({**_FOR_NOW.get(), **classes})
    try:
        yield
    finally:
        _FOR_NOW.reset(token)


def is_builtin(cls: type) -> bool:
    """Whether a class lives in this package."""
    return cls.__module__.startswith("bitwright.nn.")


def is_custom(cls: type | None) -> bool:
    """Whether a class is the user's own: it comes from outside this package, or builds itself like a QuantOpr."""
    return cls is not None and (not is_builtin(cls) or getattr(cls, "builds_itself", False))


def adopt(cls: type[nn.Module], module: nn.Module) -> Any:  # noqa: ANN401
    """Turn ``module`` into a ``cls`` without its constructor: same parameters, buffers, hooks and settings."""
    adopted = cls.__new__(cls)
    adopted.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        adopted.__dict__[name] = module.__dict__[name].copy()
    return adopted


def list_qmodules() -> dict[str, list[str]]:
    """Every QModule class by name, with the sources it serves; users' classes with the module they live in."""
    load_plugins()
    table: dict[str, list[str]] = {}
    for source, cls in QMODULES.items():
        name = describe(cls) if is_custom(cls) else cls.__name__
        table.setdefault(name, []).append(_name(source))
    return table


def _name(source: object) -> str:
    return f"Tensor.{source}" if isinstance(source, str) else getattr(source, "__name__", str(source))


def _gives_way(cls: type) -> bool:
    return getattr(cls, "gives_way", False) and not is_custom(cls)
