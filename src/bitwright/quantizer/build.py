"""Build an observer or a method by its name and options."""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bitwright.errors import ConfigError, suggest
from bitwright.methods import METHODS, Method
from bitwright.observers import OBSERVERS, Observer
from bitwright.spec import QuantSpec
from bitwright.validation import shown


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
    if kind == "observer" and options:  # methods check theirs
        _check_types(cls, name, options)
    made = cls(spec, **(options or {}))
    if getattr(made, "spec", None) is None:
        raise ConfigError(f"the {kind} {name!r} has no spec: its __init__ must call super().__init__(spec)")
    return made


def _check_types(cls: type[Any], name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of another type than the constructor's annotations say, and numbers that are not finite."""
    parameters = inspect.signature(cls).parameters
    for key, value in options.items():
        annotation = parameters[key].annotation
        if annotation is inspect.Parameter.empty:
            continue
        try:
            TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"the option {key} of {name}: {error.errors()[0]['msg']}, not {shown(value)}") from error
