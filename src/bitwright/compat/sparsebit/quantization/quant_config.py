"""``parse_qconfig``: Sparsebit's YAML files, read and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.compat.attributes import ConfigDict
from bitwright.compat.keys import section
from bitwright.compat.sparsebit.defaults import DEFAULTS
from bitwright.errors import ConfigError
from bitwright.graph import SCHEDULES
from bitwright.validation import read_data, read_text, shown, within_limits


class CfgNode(ConfigDict):
    """Settings with access by attribute and by item, which can be frozen, cloned and merged into.

    ::

        cfg = _C.clone()
        cfg.merge_from_file("qconfig.yaml")
        cfg.merge_from_list(["W.QUANTIZER.BIT", 4])
    """

    def __setitem__(self, key: str, value: object) -> None:
        if self.is_frozen():
            raise AttributeError(f"{key!r} cannot be set: the config is frozen; defrost() it first")
        super().__setitem__(key, value)

    def is_frozen(self) -> bool:
        """Whether settings cannot be changed."""
        return self.__dict__.get("frozen", False)

    def freeze(self) -> None:
        """Make settings immutable, here and below."""
        self._set_frozen(True)

    def defrost(self) -> None:
        """Make settings mutable again."""
        self._set_frozen(False)

    def _set_frozen(self, on: bool) -> None:
        self.__dict__["frozen"] = on
        for value in self.values():
            if isinstance(value, CfgNode):
                value._set_frozen(on)

    def clone(self) -> "CfgNode":
        """A copy that can be changed."""
        return self.of(self)

    def merge_from_file(self, cfg_filename: str | Path) -> None:
        """Merge a YAML file."""
        self.merge_from_other_cfg(read_data(Path(cfg_filename), f"the config {str(cfg_filename)!r}"))

    def merge_from_other_cfg(self, cfg_other: object) -> None:
        """Merge another config."""
        self._replace(_merged(section("the config", cfg_other), self, "the config"))

    def merge_from_list(self, cfg_list: list[Any]) -> None:
        """Merge alternating keys and values: ``["W.QUANTIZER.BIT", 4]``."""
        if len(cfg_list) % 2:
            raise ConfigError(f"merge_from_list takes alternating keys and values, not {cfg_list!r}")
        for key, value in zip(cfg_list[::2], cfg_list[1::2], strict=True):
            for part in reversed(str(key).split(".")):
                value = {part: value}
            self.merge_from_other_cfg(value)

    def _replace(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self[key] = self.of(value)


def parse_qconfig(source: str | Path | Mapping[str, Any]) -> CfgNode:
    """Read a config: a YAML file, its text, or a mapping, with Sparsebit's defaults for what it leaves out.

    Returns:
        The settings, with access by attribute (``cfg.W.QUANTIZER.BIT``) and by item; they may be changed.
    """
    where, data = "the config", source
    try:
        if isinstance(source, str | Path) and "\n" not in str(source):
            where = f"the config {str(source)!r}"
            data = read_data(Path(source), where)
        else:
            data = read_text(str(source)) if isinstance(source, str | Path) else within_limits(source)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, not {shown(data)}")
    return CfgNode.of(_merged(data, _C, where))


def _merged(given: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``given`` over the defaults; unknown keys are refused."""
    known = list(defaults)
    if where == "SCHEDULE":  # this also switches custom schedules
        known += [name.upper() for name in SCHEDULES.names()]
    section(where, given, known)
    made: dict[str, Any] = {}
    for key in {**defaults, **given}:
        path = key if where.startswith("the config") else f"{where}.{key}"
        default = defaults.get(key)
        value = given.get(key, default)
        if not isinstance(default, Mapping):
            made[key] = value
        elif value is None or isinstance(value, Mapping):
            made[key] = _merged(value or {}, default, path)
        else:
            raise ConfigError(f"{path} must be a mapping of settings, not {value!r}")
    return made


_C: CfgNode = CfgNode.of(DEFAULTS)
"""The settings where a file says nothing."""
