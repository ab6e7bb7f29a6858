"""What recipes and backends share: strict values, specs as text, files of data, and all mistakes named at once."""

import contextlib
import itertools
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError, WithJsonSchema

from bitwright.errors import ConfigError, shortened, suggest
from bitwright.spec import QuantSpec

_MOST_SHOWN = 20  # mistakes in one message
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 3, 6, 6, 6
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_WANTED = {  # by pydantic's type of a mistake, which names types of Python that files do not have
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), "a mapping"
    ),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "string_type": "text",
}

SPEC_SCHEMA = {
    "type": "string",
    "description": "A number format, then any of symmetric|affine, narrow, pot, tensor|channel:AXIS|group:SIZE:AXIS.",
    "examples": ["int8 symmetric narrow channel:0", "uint8 affine tensor", "e4m3 symmetric tensor"],
}
SpecText = Annotated[QuantSpec, BeforeValidator(QuantSpec.parse), PlainSerializer(str), WithJsonSchema({**SPEC_SCHEMA})]


class Strict(BaseModel):
    """A frozen value without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


_TAG = "tag:yaml.org,2002:float"
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")  # 1e-3 is a number, as it is in JSON
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

LONGEST = 1_000_000  # characters of a file
LARGEST = 4096  # bits of a whole number
DEEPEST = 40  # levels of lists and mappings
MOST = 20_000  # values in all, each counted as often as aliases repeat it


class _Loader(_BASE):
    """Reads plain data; a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _refuse_repeated(self.construct_object(key, deep=True) for key, _ in node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back the same."""


_Loader.add_implicit_resolver(_TAG, _NUMBER, list("-+0123456789"))
_Dumper.add_implicit_resolver(_TAG, _NUMBER, list("-+0123456789"))


def read_text(text: str) -> Any:  # noqa: ANN401
    """Read YAML or JSON text within limits, or raise a ValueError."""
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text):,} characters, more than {LONGEST:,}")
    if text.lstrip().startswith("{"):  # YAML rejects some JSON characters
        with contextlib.suppress(json.JSONDecodeError):
            return _read_json(text)
    try:
        _scan(text)
        data = _Loader(text).get_single_data()
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:  # such as of !!bool 7
        raise ValueError(str(error) or type(error).__name__) from error
    return within_limits(data)


def read_data(path: Path, what: str) -> Any:  # noqa: ANN401
    """Read a YAML or JSON file, or say why ``what`` cannot be read."""
    try:
        if path.stat().st_size > 4 * LONGEST:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        text = path.read_text(encoding="utf-8")
        return _read_json(text) if path.suffix.lower() == ".json" else read_text(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error


def within_limits(data: object) -> Any:  # noqa: ANN401
    """Return plain data that is neither too deep nor too much, or raise a ValueError."""
    known: dict[int, tuple[int, int]] = {}  # by id: values inside, levels inside

    def measure(value: object, depth: int) -> tuple[int, int]:
        if isinstance(value, int) and value.bit_length() > LARGEST:
            raise ValueError(f"it has a number of {value.bit_length():,} bits")
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return 1, 0
        if id(value) not in known:
            inside = [measure(part, depth + 1) for part in _parts(value)] if depth <= DEEPEST else []
            known[id(value)] = 1 + sum(c for c, _ in inside), 1 + max((h for _, h in inside), default=0)
        count, height = known[id(value)]
        if depth + height > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if count > MOST:
            raise ValueError(f"it has more than {MOST:,} values")
        return count, height

    measure(data, 0)
    return data


def _parts(value: Any) -> Iterable[object]:  # noqa: ANN401
    return itertools.chain.from_iterable(value.items()) if isinstance(value, Mapping) else value


def _read_json(text: str) -> Any:  # noqa: ANN401
    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated(key for key, _ in pairs)
        return dict(pairs)

    try:
        return within_limits(json.loads(text, object_pairs_hook=without_repetition))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error


def _refuse_repeated(keys: Iterable[Any]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {shown(key)} appears twice in one mapping")
        seen.add(key)


def _scan(text: str) -> None:
    """Refuse YAML that is too much or nested too deeply before it is built, which is slow and recurs."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_BASE)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if count > 2 * MOST:
            raise ValueError(f"it has more than {MOST:,} values")


def write_yaml(data: Mapping[str, Any]) -> str:
    """Data as YAML text, in the order given."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=120)


def shown(value: object) -> str:
    """A value as a message shows it: whole if it is short."""
    return _SHORT.repr(value)


def mistakes(error: ValidationError, fields_at: Callable[[tuple[Any, ...]], list[str]]) -> str:
    """The mistakes in one line, the first few of many; ``fields_at`` says which keys exist at a place."""
    found = error.errors()
    lines = []
    for item in found[:_MOST_SHOWN]:
        place = shortened(".".join(str(p) for p in item["loc"]), 100) or "(top)"
        message = shortened(item["msg"].removeprefix("Value error, "), 300)
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = f"is unknown{suggest(str(item['loc'][-1]), fields_at(item['loc'][:-1]))}"
        elif item["type"] in _WANTED:
            message = f"must be {_WANTED[item['type']]}, not {shown(item['input'])}"
        elif item["type"] not in ("missing", "value_error"):
            message += f", not {shown(item['input'])}"
        lines.append(f"{place}: {message}")
    count = len(found)
    more = [f"and {count - _MOST_SHOWN} more"] if count > _MOST_SHOWN else []
    return f"{count} mistake{'s' * (count > 1)}: " + "; ".join([*lines, *more])
