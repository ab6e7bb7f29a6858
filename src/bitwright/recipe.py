"""Recipe: the user's wishes as a validated value: a backend, defaults, and rules by name or operator."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.spec import QuantSpec

SpecText = Annotated[QuantSpec, BeforeValidator(QuantSpec.parse), PlainSerializer(str)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class TensorRecipe(_Strict):
    """How one kind of tensor is quantized; what is not given is the backend's. Plain text is the spec."""

    spec: SpecText | None = None
    observer: str | None = None
    method: str | None = None
    observer_options: dict[str, Any] = Field(default_factory=dict)
    method_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_spec(cls, given: object) -> object:
        return {"spec": given} if isinstance(given, str | QuantSpec) else given

    def over(self, base: "TensorRecipe") -> "TensorRecipe":
        """This recipe with the gaps filled from ``base``."""
        chosen = {name: getattr(self, name) or value for name, value in base}
        if self.observer is not None:
            chosen["observer_options"] = self.observer_options
        if self.method is not None:
            chosen["method_options"] = self.method_options
        return TensorRecipe.model_construct(**chosen)  # both are valid, so this is


class Rule(_Strict):
    """What to do with the operators that ``match`` names.

    ``match`` is a module name (which stands for all inside it), a glob over names, ``re:`` with a regular
    expression, or ``op:`` with an operator such as ``op:add``. The last rule that matches an operator wins.
    """

    match: str
    skip: bool = False
    weight: TensorRecipe = Field(default_factory=TensorRecipe)
    activation: TensorRecipe = Field(default_factory=TensorRecipe)

    @field_validator("match")
    @classmethod
    def _can_match(cls, match: str) -> str:
        if not match:
            raise ValueError("must name a layer, a glob, 're:…' or 'op:…', not ''")
        if match.startswith("re:"):
            try:
                re.compile(match[3:])
            except re.error as error:
                raise ValueError(f"{match!r} is not a regular expression: {error}") from error
        return match

    def matches(self, name: str, scope: str, operator: str) -> bool:
        """Whether this rule speaks of the operator called ``name``, written in the module ``scope``."""
        if self.match.startswith("op:"):
            return fnmatchcase(operator, self.match[3:])
        if self.match.startswith("re:"):
            return re.fullmatch(self.match[3:], name) is not None
        inside = any(path == self.match or path.startswith(self.match + ".") for path in (name, scope))
        return inside or fnmatchcase(name, self.match)


class Recipe(_Strict):
    """A backend, and how to depart from it."""

    backend: str = "onnxruntime"
    weight: TensorRecipe = Field(default_factory=TensorRecipe)
    activation: TensorRecipe = Field(default_factory=TensorRecipe)
    rules: tuple[Rule, ...] = ()
    # By name: whether a schedule runs, or its options. ``SCHEDULE`` is what an older dialect calls it.
    schedules: dict[str, bool | dict[str, Any]] = Field(
        default_factory=dict, validation_alias=AliasChoices("schedules", "SCHEDULE")
    )

    @classmethod
    def parse(cls, source: "Recipe | Mapping[str, Any] | str | Path") -> "Recipe":
        """Read a recipe from a mapping or from a YAML or JSON file; all mistakes are named at once."""
        if isinstance(source, Recipe):
            return source
        where = "the recipe"
        if isinstance(source, str | Path):
            where = f"the recipe {str(source)!r}"
            try:
                source = yaml.safe_load(Path(source).read_text())
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"{where} cannot be read: {error}") from error
        if not isinstance(source, Mapping):
            raise ConfigError(f"{where} must be a mapping of settings, not {type(source).__name__}")
        try:
            return cls.model_validate(dict(source))
        except ValidationError as error:
            raise ConfigError(f"{where} has {_mistakes(error)}") from error

    def rule_for(self, name: str, scope: str, operator: str) -> Rule | None:
        """The last rule that matches."""
        return next((r for r in reversed(self.rules) if r.matches(name, scope, operator)), None)

    def check_rules(self, operators: Iterable[tuple[str, str, str]]) -> None:
        """Raise if rules match none of the (name, scope, operator) given, with the nearest names."""
        known = list(operators)
        names = [path for name, scope, _ in known for path in (name, scope) if path]
        kinds = [f"op:{operator}" for _, _, operator in known if operator]
        lost = [r.match for r in self.rules if not any(r.matches(*each) for each in known)]
        if lost:
            hints = (suggest(match, kinds if match.startswith("op:") else names) for match in lost)
            lines = (f"the rule {m!r} matches no layer{hint}" for m, hint in zip(lost, hints, strict=True))
            raise UnknownNameError("; ".join(lines))


def _mistakes(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        place = ".".join(str(p) for p in item["loc"]) or "(top)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            fields = _fields_at(item["loc"][:-1])
            message = f"is unknown{suggest(str(item['loc'][-1]), fields)}"
        elif item["type"] not in ("missing", "value_error"):
            message += f", not {item['input']!r}"
        lines.append(f"{place}: {message}")
    count = len(lines)
    return f"{count} mistake{'s' * (count > 1)}: " + "; ".join(lines)


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    names = [p for p in path if isinstance(p, str)]
    if not names:
        return list(Recipe.model_fields)
    return list((Rule if names[-1] == "rules" else TensorRecipe).model_fields)
