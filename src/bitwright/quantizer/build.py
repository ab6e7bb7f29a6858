"""Build an observer or a method by its name and options."""

import inspect
from collections.abc import Mapping
from typing import Any

from bitwright.errors import ConfigError, suggest
from bitwright.methods import METHODS, Method
from bitwright.observers import OBSERVERS, Observer
from bitwright.spec import QuantSpec


def build_observer(spec: QuantSpec, name: str, options: Mapping[str, Any] | None = None) -> Observer:
    """The observer of that name for a spec."""
    return _build(OBSERVERS.get(name), "observer", name, spec, options)


def build_method(spec: QuantSpec, name: str, options: Mapping[str, Any] | None = None) -> Method:
    """The method of that name for a spec."""
    cls = METHODS.get(name)
    if spec.format.floating and not cls.floating:
        raise ConfigError(f"the method {name!r} rounds to integers: '{spec}' needs 'FixedFakeQuantize'")
    return _build(cls, "method", name, spec, options)


def _build(cls: type[Any], kind: str, name: str, spec: QuantSpec, options: Mapping[str, Any] | None) -> Any:  # noqa: ANN401
    known = [p for p in inspect.signature(cls).parameters if p != "spec"] if options else ()
    for key in options or ():
        if key not in known:
            raise ConfigError(f"the {kind} {name!r} has no option {key!r}{suggest(key, known)}")
    return cls(spec, **(options or {}))
