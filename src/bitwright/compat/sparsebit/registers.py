"""``register_observer`` and ``register_quantizer`` as Sparsebit has them: decorators that take the class's TYPE."""

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
            fit(cls, takes_qdesc=old_base is BaseObserver)
        registry.register(name.lower(), override=True)(cls)
        return cls

    return decorate


register_observer = _register(OBSERVERS, Observer, BaseObserver, "observer")
register_quantizer = _register(METHODS, Method, Quantizer, "quantizer")
