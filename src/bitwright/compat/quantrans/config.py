"""Config: settings in a Python-style file, read without running it, with access by attribute and by item."""

from pathlib import Path
from typing import Any, Self

import yaml

from bitwright.compat.literals import attribute, read_assignments
from bitwright.compat.quantrans.quantops.options import Qmodes
from bitwright.errors import ConfigError, suggest


class ConfigDict(dict[str, Any]):
    """A dict whose keys are attributes too: ``cfg.quant_transformer.quan_policy["Conv2d"]``."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the config has no {name!r}{suggest(name, [k for k in self if isinstance(k, str)])}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Config(ConfigDict):
    """The settings of a file: ``cfg = Config.fromfile("quant.py")``, then ``cfg.quant_transformer``."""

    @classmethod
    def fromfile(cls, filename: str | Path) -> Self:
        """Read ``name = dict(…)`` lines of a Python file, or a YAML or JSON file; nothing is executed."""
        path = Path(filename)
        if path.suffix in (".yaml", ".yml", ".json"):
            try:
                found = yaml.safe_load(path.read_text())
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"the config {str(path)!r} cannot be read: {error}") from error
            if not isinstance(found, dict):
                raise ConfigError(f"the config {str(path)!r} must be a mapping of settings, not {found!r}")
        else:
            found = read_assignments(path, _resolve)
        if "_base_" in found:
            raise ConfigError(f"the config {str(path)!r} has '_base_', which is not read: put all settings in one file")
        return cls({name: wrap(value) for name, value in found.items()})


def wrap(value: Any) -> Any:
    """The same settings, every dict in them with attribute access."""
    if isinstance(value, dict):
        return ConfigDict({key: wrap(item) for key, item in value.items()})
    return type(value)(map(wrap, value)) if isinstance(value, list | tuple) else value


def _resolve(name: str) -> Any:
    """``Qmodes.kernel_wise`` is the one thing that settings of layers need by name."""
    tail = name.partition("Qmodes.")[2]
    if not tail:
        raise ConfigError(f"the name {name!r} means nothing in a config; write text in quotes, or Qmodes.kernel_wise")
    return attribute(Qmodes, tail, "Qmodes")
