"""Config: settings in a Python-style file, read without running it, with access by attribute and by item."""

from pathlib import Path
from typing import Any, Self

from bitwright.compat.attributes import ConfigDict
from bitwright.compat.literals import attribute, read_assignments
from bitwright.compat.quantrans.quantops.options import Qmodes
from bitwright.errors import ConfigError
from bitwright.validation import read_data


class Config(ConfigDict):
    """The settings of a file: ``cfg = Config.fromfile("quant.py")``, then ``cfg.quant_transformer``."""

    @classmethod
    def fromfile(cls, filename: str | Path) -> Self:
        """Read ``name = dict(…)`` lines of a Python file, or a YAML or JSON file; nothing is executed."""
        path = Path(filename)
        if path.suffix in (".yaml", ".yml", ".json"):
            found = read_data(path, f"the config {str(path)!r}")
            if not isinstance(found, dict):
                raise ConfigError(f"the config {str(path)!r} must be a mapping of settings, not {found!r}")
        else:
            found = read_assignments(path, _resolve)
        if "_base_" in found:
            raise ConfigError(f"the config {str(path)!r} has '_base_', which is not read: put all settings in one file")
        return cls({name: ConfigDict.of(value) for name, value in found.items()})


def _resolve(name: str) -> Any:
    """Resolve ``Qmodes.kernel_wise``, the only name that settings of layers need."""
    tail = name.partition("Qmodes.")[2]
    if not tail:
        raise ConfigError(f"the name {name!r} is not known in a config; write text in quotes, or Qmodes.kernel_wise")
    return attribute(Qmodes, tail, "Qmodes")
