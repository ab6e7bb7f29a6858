"""``extra_quantizer_dict``: what else is quantized, and what is not, as rules."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bitwright.compat.keys import flag, items, section
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.errors import ConfigError
from bitwright.nn.operators import operator_of_source
from bitwright.recipe import Rule

_ADDED = ["additional_function_type", "additional_module_type", "additional_node_name"]
_LEFT_OUT = ["exclude_module_name", "exclude_function_type", "exclude_node_name"]
KEYS = [*_ADDED, *_LEFT_OUT, "academic_mode"]


def read_selection(given: object, backend: BackendType) -> list[Rule]:
    """The rules, strongest last: nodes added by name are quantized even if excluded."""
    config = section("extra_quantizer_dict", given, KEYS)
    if flag("academic_mode", config.get("academic_mode", False)) and backend is not BackendType.OPENVINO:
        raise ConfigError(f"academic_mode is for BackendType.OPENVINO, not for {backend}")
    rules = [Rule(match=m, force=True, optional=True) for m in _matches(config, _ADDED[:2])]
    rules += [Rule(match="op:cat", skip=True, optional=True)] * bool(config.get("academic_mode"))
    rules += [Rule(match=m, skip=True, optional=m.startswith("op:")) for m in _matches(config, _LEFT_OUT)]
    return rules + [Rule(match=m, force=True) for m in _matches(config, _ADDED[2:])]


def added_type(cls: type[nn.Module]) -> Rule:
    """The rule that all modules of a class are quantized."""
    return Rule(match=f"type:{cls.__name__}", force=True, optional=True)


def _matches(config: Mapping[str, Any], keys: list[str]) -> list[str]:
    return [_match(key, item) for key in keys for item in items(key, config.get(key, []))]


def _match(key: str, item: object) -> str:
    fits, what, selector = _KINDS[key.split("_", 1)[1]]
    if not fits(item):
        raise ConfigError(f"{key} must hold {what}, not {item!r}")
    return selector(item)


def _of_function(item: Any) -> str:
    operator = operator_of_source(item)
    return f"op:{operator.name if operator else getattr(item, '__name__', item)}"


_NAME = (lambda item: isinstance(item, str) and item, "names in quotes")
# What each kind of list holds: a test, words for it, and the selector of a rule.
_KINDS: dict[str, tuple[Callable[[Any], object], str, Callable[[Any], str]]] = {
    "node_name": (*_NAME, lambda name: f"node:{name}"),
    "module_name": (*_NAME, str),
    "module_type": (
        lambda item: isinstance(item, type) and issubclass(item, nn.Module),
        "module classes such as torch.nn.Upsample",
        lambda cls: f"type:{cls.__name__}",
    ),
    "function_type": (
        lambda item: isinstance(item, str) or (callable(item) and not isinstance(item, type)),
        "functions such as operator.add",
        _of_function,
    ),
}
