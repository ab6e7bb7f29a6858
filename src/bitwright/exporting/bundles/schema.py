"""Check JSON against a JSON Schema: the part of the standard that the schemas here need."""

import json
import math
import operator
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_WORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "minimum", "maximum"),
    *("exclusiveMinimum", "minItems", "maxItems", "anyOf", "minLength"),
    *("$schema", "$defs", "$ref", "title", "description", "$comment"),
}


def _has_at_least(data: object, count: int) -> bool:
    return not isinstance(data, list | str | dict) or len(data) >= count


_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "const": (operator.eq, "is {data}, not {limit!r}"),
    "enum": (lambda data, limit: data in limit, "is {data}, not one of {limit}"),
    "minimum": (operator.ge, "is {data}, less than {limit}"),
    "exclusiveMinimum": (operator.gt, "is {data}, not more than {limit}"),
    "maximum": (operator.le, "is {data}, more than {limit}"),
    "minItems": (_has_at_least, "has fewer than {limit} items"),
    "minLength": (_has_at_least, "has fewer than {limit} characters"),
    "maxItems": (lambda data, limit: not isinstance(data, list) or len(data) <= limit, "has more than {limit} items"),
}


@cache
def schema_named(name: str) -> dict[str, Any]:
    """Load a schema of this package."""
    text = resources.files("bitwright.exporting.bundles").joinpath("schemas", f"{name}.json").read_text("utf-8")
    return json.loads(text)


def problems(data: object, schema: dict[str, Any]) -> list[str]:
    """What in ``data`` does not fit a schema, with the place of each mistake."""
    return list(_problems(data, schema, schema, ""))


def _problems(data: Any, schema: Any, root: dict[str, Any], where: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if unknown := set(schema) - _WORDS:
        raise ValueError(f"the schema uses {sorted(unknown)}, which this checker does not know")
    here = where or "the file"
    if "anyOf" in schema:
        tried = [list(_problems(data, option, root, where)) for option in schema["anyOf"]]
        yield from min(tried, key=len)[:1]
        return
    if "type" in schema and not _is(data, schema["type"]):
        yield f"{here} is {_shown(data)}, not of the type {schema['type']}"
        return
    yield from _limits(data, schema, here)
    if isinstance(data, dict):
        yield from _members(data, schema, root, where)
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _problems(item, schema.get("items", {}), root, f"{where}[{i}]")


def _is(data: object, kind: str) -> bool:
    if kind == "integer":
        return isinstance(data, int) and not isinstance(data, bool)
    if kind == "number":
        return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
    return isinstance(data, _TYPES[kind])


def _limits(data: object, schema: dict[str, Any], here: str) -> Iterator[str]:
    for word, (kept, what) in _LIMITS.items():
        if word in schema and not kept(data, schema[word]):
            limit = ", ".join(map(repr, schema[word])) if word == "enum" else schema[word]
            yield f"{here} {what.format(data=_shown(data), limit=limit)}"


def _members(data: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in data:
            yield f"{where or 'the file'} lacks {name!r}"
    for name, value in data.items():
        place = f"{where}.{name}" if where else name
        if name in known:
            yield from _problems(value, known[name], root, place)
        elif others is False:
            yield f"{place} is unexpected; known are {', '.join(known)}"
        elif isinstance(others, dict):
            yield from _problems(value, others, root, place)


def _shown(data: object) -> str:
    return repr(data) if len(repr(data)) < 60 else f"{repr(data)[:57]}…"
