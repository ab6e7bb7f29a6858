"""Options of schedules: what a recipe may set, by the signature of a schedule's function or class."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from bitwright.errors import ConfigError, suggest


@dataclass(frozen=True)
class Option:
    """One option: its type (None if not annotated) and its default."""

    kind: Any
    default: Any


def options_of(source: Callable[..., Any], schedule: str) -> dict[str, Option]:
    """The options that a schedule declares: keyword arguments with defaults."""
    parameters = list(inspect.signature(source).parameters.values())
    if not isinstance(source, type):
        if not parameters:
            raise ConfigError(f"the schedule {schedule!r} must take the model as its first argument")
        parameters = parameters[1:]
    function = source.__init__ if isinstance(source, type) else source
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # an annotation that cannot be read here is not checked
        hints = {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    options = {}
    for parameter in parameters:
        if parameter.kind in variable:
            continue
        if parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"the option {parameter.name!r} of the schedule {schedule!r} needs a default")
        options[parameter.name] = Option(hints.get(parameter.name), parameter.default)
    return options


def check_options(schedule: str, options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what is given to the options' types, or raise with the nearest names."""
    names = {name.lower(): name for name in options}
    settings = {}
    for name, value in given.items():
        if not isinstance(name, str) or name.lower() not in names:
            raise ConfigError(f"the schedule {schedule!r} has no option {name!r}{suggest(str(name), options)}")
        option = options[names[name.lower()]]
        try:
            settings[names[name.lower()]] = value if option.kind is None else _read(option.kind, value)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise ConfigError(f"the option {name!r} of the schedule {schedule!r}: {said}, not {value!r}") from error
    return settings


def _read(kind: Any, value: Any) -> Any:
    return TypeAdapter(kind, config={"arbitrary_types_allowed": True}).validate_python(value)
