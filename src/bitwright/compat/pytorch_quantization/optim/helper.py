"""Parameters by pattern: match, group for an optimizer, freeze; and weights quantized in place."""

import fnmatch
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import weight_sites

_log = logging.getLogger(__name__)


def match_parameters(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Parameter]:
    """Every parameter whose name matches one of the patterns, once.

    A pattern is a part of the name, a regular expression to search for, or a glob for the whole name.
    """
    tests = [_test(p) for p in ([patterns] if isinstance(patterns, str) else patterns)]
    for name, parameter in model.named_parameters():
        if any(test(name) for test in tests):
            yield parameter


def group_parameters(
    model: nn.Module,
    patterns_list: Sequence[Sequence[str]],
    lrs: Sequence[float] | None = None,
    momentums: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer, one for each list of patterns, with its rates.

    A parameter belongs to the first group that matches it.
    """
    settings = {"lr": lrs, "momentum": momentums, "weight_decay": weight_decays}
    rates = {key: values for key, values in settings.items() if values is not None}
    _check(patterns_list, rates)
    taken: set[nn.Parameter] = set()
    groups: list[dict[str, Any]] = []
    for number, patterns in enumerate(patterns_list):
        chosen = [p for p in match_parameters(model, patterns) if p not in taken]
        if not chosen:
            raise ConfigError(f"no remaining parameter matches the patterns {list(patterns)} of group {number}")
        taken.update(chosen)
        groups.append({"params": chosen, **{key: values[number] for key, values in rates.items()}})
    return groups


def _check(patterns_list: Sequence[Sequence[str]], rates: Mapping[str, Sequence[float]]) -> None:
    for key, values in rates.items():
        if len(values) != len(patterns_list):
            raise TypeError(f"{key} must match the groups: they are {len(patterns_list)}, its values {len(values)}")
    for patterns in patterns_list:
        if isinstance(patterns, str):
            raise TypeError(f"patterns_list must be list of list of patterns: write [{patterns!r}], not {patterns!r}")


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match."""
    count = 0
    for parameter in match_parameters(model, patterns):
        parameter.requires_grad_(False)
        count += 1
    _log.info("froze %d parameters", count)


def quant_weight_inplace(model: nn.Module) -> None:
    """Replace every weight that has a quantizer by its quantized value, and disable the quantizer.

    Then a forward does not quantize weights again; a weight that is trained afterwards is not on the grid any more. A
    BatchNorm that is folded in stays apart: the weight is what gives the quantized one when multiplied by it.
    """
    for site in weight_sites(model):
        if site.plain:
            site.replace(site.quantizer(site.weight()))
            site.quantizer.disable()


def _test(pattern: str) -> Callable[[str], bool]:
    try:
        expression = re.compile(pattern)
    except re.error:
        expression = re.compile(fnmatch.translate(pattern))  # a glob such as "*.weight"
    return lambda name: pattern in name or expression.search(name) is not None


__all__ = ["freeze_parameters", "group_parameters", "match_parameters", "quant_weight_inplace"]
