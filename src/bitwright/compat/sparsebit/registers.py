"""``register_observer`` and ``register_quantizer`` as Sparsebit has them: decorators that take the class's TYPE."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from bitwright.compat.sparsebit.own_classes import BaseObserver, Quantizer, fit
from bitwright.errors import ConfigError
from bitwright.methods.base import METHODS, Method
from bitwright.observers import OBSERVERS, Observer

C = TypeVar("C", bound=type)


def _register(registry: Any, base: type, old_base: type, kind: str) -> Callable[[C], C]:
    def decorate(cls: C) -> C:
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise ConfigError(f"a {kind} must be a class derived from {base.__name__}, not {cls!r}")
        name = getattr(cls, "TYPE", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{cls.__name__} needs TYPE = 'its name', by which a config chooses it")
        if issubclass(cls, old_base):
            _check_called(cls, kind)
            fit(cls, takes_qdesc=old_base is BaseObserver)
        registry.register(name.lower(), override=True)(cls)
        return cls

    return decorate


_NOT_CALLED = ("calc_qparams", "calc_qparams_with_minmax", "_qparams_preprocess", "update", "update_observer")


def _check_called(cls: type, kind: str) -> None:
    """Refuse what would not be called, or not with what it takes."""
    lost = next((name for name in _NOT_CALLED if hasattr(cls, name)), None)
    if lost is not None:
        raise ConfigError(
            f"{cls.__name__}.{lost} would not be called: an observer finds ranges in calc_minmax, a quantizer rounds "
            "in _forward, and docs/how-to/custom-method.md says how to write one that learns parameters"
        )
    if kind == "quantizer":
        try:
            inspect.signature(cls._forward).bind("self", "x", "scale", "zero_point")  # pyrefly: ignore
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}._forward takes x, scale and zero_point: {error}") from error


register_observer = _register(OBSERVERS, Observer, BaseObserver, "observer")
register_quantizer = _register(METHODS, Method, Quantizer, "quantizer")
