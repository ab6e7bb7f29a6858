"""``SPECIFIC``: Sparsebit's settings of single layers, as rules.

Patterns are of flat names (``layer1_0_conv1``) or of dotted ones.
"""

import copy
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from bitwright.compat.keys import section
from bitwright.compat.sparsebit.tensors import read_tensor
from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.recipe import Rule, TensorRecipe
from bitwright.recipe.expressions import expression

_GLOB = re.compile(r"[*?\[]")


def read_specific(weight: Mapping[str, Any], activation: Mapping[str, Any]) -> list[Rule]:
    """The rules of both lists. In each list the first pattern that fits a layer holds; of rules, the last does."""
    of_weight, of_input = _tensors("W", weight), _tensors("A", activation)
    both = [name for name in of_weight if name in of_input]
    rules = [_one(n, of_input, weight=t) for n, t in reversed(of_weight.items()) if n not in both]
    rules += [_one(n, of_weight, input=t) for n, t in reversed(of_input.items()) if n not in both]
    pairs = itertools.product(reversed(of_weight.items()), reversed(of_input.items()))
    return rules + [_joint(first, second) for first, second in pairs if _may_meet(first[0], second[0])]


def _joint(of_weight: tuple[str, TensorRecipe], of_input: tuple[str, TensorRecipe]) -> Rule:
    """The rule of the layers that a pattern of each list fits."""
    (first, weight), (second, input) = of_weight, of_input
    if first != second:
        match = f"re:(?={_whole(first)}$){_whole(second)}"
        return Rule(match=match, weight=weight, input=input, optional=True)
    if weight.floating and input.floating:
        return Rule(match=_match(first), skip=True)
    return Rule(match=_match(first), weight=weight, input=input)


def check_patterns(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse patterns that fit none of the names of a model's operators."""
    known = list(names)
    parents = {".".join(name.split(".")[:depth]) for name in known for depth in range(1, name.count(".") + 1)}
    for kind in "WA":
        for entry in config[kind]["SPECIFIC"]:
            for pattern in entry:
                if not any(expression(rf"{_expression(pattern)}(\..*)?").fits(name) for name in known):
                    hint = suggest(pattern.strip("*?"), [*known, *parents])
                    raise UnknownNameError(f"{kind}.SPECIFIC: {pattern!r} fits no layer{hint}")


def _one(pattern: str, others: Iterable[str], **tensor: TensorRecipe) -> Rule:
    """The rule of a pattern of one list; patterns of the other may leave it nothing."""
    optional = any(_may_meet(pattern, other) for other in others)
    return Rule(match=_match(pattern), optional=optional, **tensor)  # pyrefly: ignore


def _tensors(kind: str, config: Mapping[str, Any]) -> dict[str, TensorRecipe]:
    """For every pattern, in the file's order, the section's recipe with the pattern's changes."""
    where = f"{kind}.SPECIFIC"
    if not isinstance(config["SPECIFIC"], list | tuple):
        raise ConfigError(
            f"{where} must be a list of mappings from names to lists of settings, not {config['SPECIFIC']!r}"
        )
    found: dict[str, TensorRecipe] = {}
    for entry in config["SPECIFIC"]:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must hold mappings from names to lists of settings, not {entry!r}")
        for pattern, settings in entry.items():
            found.setdefault(str(pattern), read_tensor(kind, _changed(f"{where}[{pattern!r}]", config, settings)))
    return found


def _changed(where: str, config: Mapping[str, Any], settings: object) -> dict[str, Any]:
    """A copy of a section with ``["QUANTIZER.BIT", 8, …]`` set in it."""
    if not isinstance(settings, list | tuple) or len(settings) % 2:
        raise ConfigError(f"{where} must be a list of keys and values in turn, not {settings!r}")
    made = copy.deepcopy(dict(config))
    for path, value in zip(settings[::2], settings[1::2], strict=True):
        place: Any = made
        *parents, last = str(path).split(".")
        for step, part in enumerate([*parents, last]):
            section(where, {part: None}, place if isinstance(place, Mapping) else ())
            if step == len(parents):
                place[part] = value
            place = place[part]
    return made


def _match(pattern: str) -> str:
    """A pattern as a rule has it: ``_`` of a flat name stands for the dots of the real one."""
    dotted = "." in pattern and not _GLOB.search(pattern)
    return pattern if dotted or "_" not in pattern else f"re:{_expression(pattern)}"


def _may_meet(first: str, second: str) -> bool:
    """Whether two patterns may fit one layer: a name stands for all inside it."""
    one, other = (f"{pattern.replace('.', '_')}_" for pattern in (first, second))
    return _GLOB.search(first + second) is not None or one.startswith(other) or other.startswith(one)


def _whole(pattern: str) -> str:
    return _expression(pattern) if _GLOB.search(pattern) else rf"{_expression(pattern)}(?:\..*)?"


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".").replace("_", "[._]")
