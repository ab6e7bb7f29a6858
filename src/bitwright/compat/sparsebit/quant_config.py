"""``parse_qconfig``: Sparsebit's YAML files, read and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bitwright.compat.attributes import ConfigDict, wrap
from bitwright.compat.keys import section
from bitwright.compat.sparsebit.defaults import DEFAULTS
from bitwright.errors import ConfigError
from bitwright.graph import SCHEDULES
from bitwright.validation import read_data, read_text


def parse_qconfig(source: str | Path | Mapping[str, Any]) -> ConfigDict:
    """Read a config: a YAML file, its text, or a mapping; what it leaves out is Sparsebit's default.

    Returns:
        The settings, with access by attribute (``cfg.W.QUANTIZER.BIT``) and by item; they may be changed.
    """
    where, data = "the config", source
    if isinstance(source, str | Path):
        if "\n" not in str(source):
            where = f"the config {str(source)!r}"
        try:
            data = read_text(str(source)) if where == "the config" else read_data(Path(source), where)
        except yaml.YAMLError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {data!r}")
    return wrap(_merged(data, DEFAULTS, where))


def _merged(given: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``given`` over the defaults; unknown keys are refused."""
    known = list(defaults)
    if where == "SCHEDULE":  # custom schedules are switched there, too
        known += [name.upper() for name in SCHEDULES.names()]
    section(where, given, known)
    made: dict[str, Any] = {}
    for key in {**defaults, **given}:
        path = key if where.startswith("the config") else f"{where}.{key}"
        default = defaults.get(key)
        value = given.get(key, default)
        if not isinstance(default, dict):
            made[key] = value
        elif value is None or isinstance(value, Mapping):
            made[key] = _merged(value or {}, default, path)
        else:
            raise ConfigError(f"{path} must be a mapping of settings, not {value!r}")
    return made
