"""Read a config file of any dialect as a recipe: detect the dialect, and call its translator."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.compat import mqbench, quantrans, sparsebit
from bitwright.compat.keys import section
from bitwright.compat.literals import attribute, read_assignments
from bitwright.compat.mqbench.translate import KEYS as MQBENCH_KEYS
from bitwright.compat.sparsebit.defaults import DEFAULTS as SPARSEBIT_KEYS
from bitwright.errors import ConfigError, nearest, suggest
from bitwright.recipe import Recipe
from bitwright.validation import read_data, shown

_ROOTS = {
    "torch": "torch",
    "operator": "operator",
    "bitwright": "bitwright",
    "mqbench": "bitwright.compat.mqbench",
    "quantrans": "bitwright.compat.quantrans",
}
_NAMES = {"BackendType": mqbench.BackendType, "Qmodes": quantrans.Qmodes}
_BACKEND_KEYS = ("backend", "deploy_backend")


def convert(path: str | Path) -> tuple[str, Recipe, list[str]]:
    """The dialect of a config file, its recipe, and notes on what has no equivalent; runs no code."""
    where = Path(path)
    data = _read(where)
    for dialect, (keys, translate) in _DIALECTS.items():
        if any(key in data for key in keys):
            return dialect, *translate(data)
    known = [*MQBENCH_KEYS, *SPARSEBIT_KEYS, *Recipe.model_fields, "quant_transformer", "extra_config"]
    hints = "; ".join(f"{key!r}{suggest(str(key), known)}" for key in list(data)[:3]) or "it is empty"
    raise ConfigError(f"{str(where)!r} is not a config of a known dialect: {hints}")


def _read(where: Path) -> Mapping[str, Any]:
    data = read_assignments(where, resolve) if where.suffix == ".py" else read_data(where, f"the config {str(where)!r}")
    if not isinstance(data, Mapping):
        raise ConfigError(f"{str(where)!r} must be a mapping of settings, not {shown(data)}")
    if "extra_config" in data:
        data = {**section("extra_config", data["extra_config"]), **{k: data[k] for k in _BACKEND_KEYS if k in data}}
    return data


def resolve(name: str) -> Any:
    """What a dotted name stands for: something from torch, operator or Bitwright, or the user's own code."""
    head, _, tail = name.partition(".")
    last = name.split(".")
    for known, found in _NAMES.items():  # wherever it is imported from
        if known in last:
            return attribute(found, ".".join(last[last.index(known) + 1 :]), known)
    if head in _ROOTS:
        root = importlib.import_module(_ROOTS[head])
        return attribute(root, tail, head) if tail else root
    if nearest(head, _ROOTS):
        raise ConfigError(f"the name {name!r} is not known{suggest(head, _ROOTS)}")
    return _stand_in(name)


def _stand_in(name: str) -> Any:
    """Stands in for the user's own class or function, because a translator needs only its name."""
    module, _, last = name.rpartition(".")
    if last[:1].isupper():
        return type(last, (nn.Module,), {"__module__": module})

    def function(*args: object, **kwargs: object) -> Any:
        raise ConfigError(f"{name} is your own code: a config is read, not run")

    function.__name__ = last
    return function


def _mqbench(data: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    given = [data[key] for key in _BACKEND_KEYS if key in data]
    extra = {key: value for key, value in data.items() if key not in _BACKEND_KEYS}
    recipe, notes = mqbench.to_recipe(_with_objects(extra), *given[:1])
    if not given:
        notes.append("the file names no backend, so 'academic' is used; write backend: Tensorrt, or another")
    return recipe, notes


def _quantrans(data: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    return quantrans.to_recipe(data.get("quant_transformer", data))


def _bitwright(data: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    return Recipe.parse(data), []


# The keys that identify a dialect, and its translator; the first match wins.
_DIALECTS: dict[str, tuple[Iterable[str], Callable[[Mapping[str, Any]], tuple[Recipe, list[str]]]]] = {
    "QuanTransformer": (("quant_transformer", "quan_policy"), _quantrans),
    "MQBench": (MQBENCH_KEYS, _mqbench),
    "Sparsebit": (SPARSEBIT_KEYS, sparsebit.to_recipe),
    "Bitwright": (Recipe.model_fields, _bitwright),
}


def _with_objects(extra: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with classes and functions written as text (as in YAML) replaced by the real ones."""
    made = {
        key: _objects(value) if key in ("leaf_module", "extra_fuse_dict") else value for key, value in extra.items()
    }
    chosen = extra.get("extra_quantizer_dict")
    if isinstance(chosen, Mapping):
        made["extra_quantizer_dict"] = {k: _objects(v) if str(k).endswith("_type") else v for k, v in chosen.items()}
    return made


def _objects(value: object) -> Any:
    """Replace text by what it names, at any depth; ``"torch.nn.Linear, torch.nn.BatchNorm1d"`` is a chain."""
    if isinstance(value, Mapping):
        return {_objects(key): _objects(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_objects, value))
    if isinstance(value, str) and "," in value:
        return tuple(_objects(part.strip()) for part in value.split(","))
    return resolve(value) if isinstance(value, str) and "." in value else value
