"""What recipes and backends share: strict values, specs as text, files of data, and all mistakes named at once."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError, WithJsonSchema

from bitwright.errors import ConfigError, suggest
from bitwright.spec import QuantSpec

SPEC_SCHEMA = {
    "type": "string",
    "description": "A number format, then any of symmetric|affine, narrow, pot, tensor|channel:AXIS|group:SIZE:AXIS.",
    "examples": ["int8 symmetric narrow channel:0", "uint8 affine tensor", "e4m3 symmetric tensor"],
}
SpecText = Annotated[QuantSpec, BeforeValidator(QuantSpec.parse), PlainSerializer(str), WithJsonSchema({**SPEC_SCHEMA})]


class Strict(BaseModel):
    """A frozen value without unknown keys; the text under a field is its description in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, use_attribute_docstrings=True)


_TAG = "tag:yaml.org,2002:float"
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")  # 1e-3 is a number, as it is in JSON


class _Loader(yaml.SafeLoader):
    """Reads plain data; a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} stands twice in one mapping", node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back the same."""


_Loader.add_implicit_resolver(_TAG, _NUMBER, list("-+0123456789"))
_Dumper.add_implicit_resolver(_TAG, _NUMBER, list("-+0123456789"))


def read_text(text: str) -> Any:  # noqa: ANN401
    """Read YAML or JSON text; try JSON first: YAML rejects some JSON characters."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return _Loader(text).get_single_data()


def read_data(path: Path, what: str) -> Any:  # noqa: ANN401
    """Read a YAML or JSON file, or say why ``what`` cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix.lower() == ".json" else read_text(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error


def write_yaml(data: Mapping[str, Any]) -> str:
    """Data as YAML text, in the order given."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=120)


def mistakes(error: ValidationError, fields_at: Callable[[tuple[Any, ...]], list[str]]) -> str:
    """All mistakes in one line; ``fields_at`` says which keys exist at a place."""
    lines = []
    for item in error.errors():
        place = ".".join(str(p) for p in item["loc"]) or "(top)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = f"is unknown{suggest(str(item['loc'][-1]), fields_at(item['loc'][:-1]))}"
        elif item["type"] not in ("missing", "value_error"):
            message += f", not {item['input']!r}"
        lines.append(f"{place}: {message}")
    count = len(lines)
    return f"{count} mistake{'s' * (count > 1)}: " + "; ".join(lines)
