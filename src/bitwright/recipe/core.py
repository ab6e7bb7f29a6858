"""Recipe: what the user wants as a validated value: a backend, defaults, and rules by name or operator."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.files import atomic_write
from bitwright.recipe.presets import PRESETS, expand, find_preset
from bitwright.recipe.rule import Rule, RuleTarget
from bitwright.recipe.tensor import Described, TensorRecipe
from bitwright.validation import mistakes, read_data, read_text, within_limits, write_yaml

Corrector = Literal["smooth", "equalize", "weight_ranges", "gptq", "norms", "analytic_bias", "bias"]
SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


class Recipe(Described):
    """A backend, and how to deviate from it."""

    preset: str | None = Field(default=None, exclude=True)
    """Settings under a name such as W4A8, read in its place: the recipe then has them, not the name."""
    backend: str = "onnxruntime"
    """Name of the target, or the path of a YAML file that describes one."""
    weight: TensorRecipe = Field(default_factory=TensorRecipe)
    """How weights are quantized, where not as the backend does."""
    activation: TensorRecipe = Field(default_factory=TensorRecipe)
    """How everything else is quantized, where not as the backend does."""
    rules: tuple[Rule, ...] = ()
    """How single operators depart from that; the last rule that matches an operator wins."""
    schedules: dict[str, bool | dict[str, Any]] = Field(
        default_factory=dict, validation_alias=AliasChoices("schedules", "SCHEDULE")
    )
    """By name: whether a schedule runs, or its options. An older dialect calls it SCHEDULE."""
    leaves: tuple[str, ...] = ()
    """Modules that stay whole and float: names, globs, or type:Name."""
    correct: tuple[Corrector, ...] = ()
    """What ``bw.calibrate`` corrects once ranges are found, in this order; [] corrects nothing."""
    allow_float: bool = False
    """Leave an operator float where the backend cannot do what is asked, instead of refusing it all."""

    @model_validator(mode="before")
    @classmethod
    def _read_preset(cls, given: Any) -> Any:  # noqa: ANN401
        name = given.get("preset") if isinstance(given, Mapping) else None
        preset = find_preset(name) if isinstance(name, str) else None
        if preset is None:
            return given
        return expand({k: v for k, v in given.items() if k != "preset"}, preset)

    @field_validator("preset")
    @classmethod
    def _no_such_preset(cls, name: str | None) -> None:
        if name is not None:  # an existing one was read by now
            raise ValueError(f"unknown preset {name!r}{suggest(name, PRESETS)}")

    @classmethod
    def parse(cls, source: "Recipe | Mapping[str, Any] | str | Path") -> "Recipe":
        """Read a recipe; all mistakes are reported at once.

        Args:
            source: a mapping, the name of a preset, the path of a YAML or JSON file, or multi-line YAML text.
        """
        if isinstance(source, Recipe):
            return source
        where, data = _read(source)
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where} must be a mapping of settings, not {type(data).__name__}")
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(f"{where} has {mistakes(error, _fields_at)}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`parse` reads back as the same recipe, without defaults."""
        data: dict[str, Any] = {"backend": self.backend}
        data |= {k: t.to_data() for k, t in (("weight", self.weight), ("activation", self.activation)) if not t.empty}
        plain = {"preset", "backend", "weight", "activation", "rules"}
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude=plain)
        rules = {"rules": [rule.to_data() for rule in self.rules]} if self.rules else {}
        return data | changed | rules

    def to_yaml(self) -> str:
        return write_yaml(self.to_dict())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write a .yaml or .json file, whole or not at all."""
        target = Path(path)
        writers = {".yaml": self.to_yaml, ".yml": self.to_yaml, ".json": self.to_json}
        if target.suffix.lower() not in writers:
            raise ConfigError(f"a recipe is saved as {', '.join(writers)}, not as {target.suffix!r} ({str(target)!r})")
        with atomic_write(target) as partial:
            partial.write_text(writers[target.suffix.lower()](), encoding="utf-8")
        return target

    @classmethod
    def schema(cls) -> dict[str, Any]:  # pyrefly: ignore  (pydantic's own, of this name, is deprecated)
        """The JSON schema of recipes, for editors and other programs."""
        return {"$schema": SCHEMA_ID, **cls.model_json_schema()}

    def rule_for(self, target: RuleTarget) -> Rule | None:
        return next((r for r in reversed(self.rules) if r.matches(target)), None)

    def check_rules(self, targets: Iterable[RuleTarget]) -> None:
        """Raise if rules match none of the operators given, with the nearest names."""
        known = list(targets)
        lost = [r.match for r in self.rules if not r.optional and not any(r.matches(each) for each in known)]
        if lost:
            raise UnknownNameError("; ".join(f"the rule {m!r} matches no layer{_hint(m, known)}" for m in lost))


def _hint(match: str, known: list[RuleTarget]) -> str:
    """The nearest names of the kind that a rule matches."""
    choices = {
        "op": [f"op:{s.operator}" for s in known if s.operator],
        "type": [f"type:{t}" for s in known for t in s.types],
        "node": [f"node:{s.node}" for s in known if s.node],
    }
    names = [path for s in known for path in (s.name, s.scope) if path]
    return suggest(match, choices.get(match.partition(":")[0], names))


def _read(source: object) -> tuple[str, Any]:
    """The name of a source in messages, and its data."""
    if isinstance(source, str) and "\n" in source:
        try:
            return "the recipe", read_text(source)
        except ValueError as error:
            raise ConfigError(f"the recipe cannot be read: {error}") from error
    if isinstance(source, str | Path) and not Path(source).suffix and not _exists(Path(source)):
        if find_preset(str(source)) is None:
            raise UnknownNameError(f"unknown preset {str(source)!r}, and no such file{suggest(str(source), PRESETS)}")
        return "the recipe", {"preset": str(source)}
    if isinstance(source, str | Path):
        where = f"the recipe {str(source)!r}"
        return where, read_data(Path(source), where)
    try:
        return "the recipe", within_limits(source)
    except ValueError as error:
        raise ConfigError(f"the recipe cannot be read: {error}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    names = [p for p in path if isinstance(p, str)]
    if not names:
        return list(Recipe.model_fields)
    return list((Rule if names[-1] == "rules" else TensorRecipe).model_fields)
