"""SpecialLayers: layers of a model by name, each with the dict that describes its quantized layer."""

from collections.abc import Mapping
from typing import Any, Self

from bitwright.compat.keys import section
from bitwright.errors import ConfigError

_KEYS = ("layers_name", "convert_type")


class SpecialLayers(dict[str, Any]):
    """What each layer becomes, by name; also as the two lists of the config."""

    @property
    def layers_name(self) -> list[str]:
        return list(self)

    @property
    def convert_type(self) -> list[Any]:
        """What each becomes, in the order of the names."""
        return list(self.values())

    @classmethod
    def read(cls, given: object) -> Self:
        """Read ``dict(layers_name=[…], convert_type=[…])``, the same as attributes of an object, or None."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        names, types = _lists(given)
        if len(names) != len(types):
            raise ConfigError(
                f"special_layers has {len(names)} names in layers_name and {len(types)} dicts in convert_type: "
                "give one dict for each name"
            )
        for place, name in enumerate(names):
            if not isinstance(name, str) or not name:
                raise ConfigError(f"special_layers: layers_name must hold names in quotes, not {name!r}")
            if name in names[:place]:
                raise ConfigError(f"special_layers names {name!r} twice")
        return cls(zip(names, types, strict=True))


def _lists(given: object) -> list[Any]:
    if isinstance(given, Mapping):
        lists = [section("special_layers", given, _KEYS).get(key, []) for key in _KEYS]
    else:
        lists = [getattr(given, key, None) for key in _KEYS]
    for key, value in zip(_KEYS, lists, strict=True):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"special_layers needs the list {key}, not {value!r}")
    return lists
