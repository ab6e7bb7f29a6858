"""ConfigDict: settings with access by attribute and by item."""

from collections.abc import Mapping
from typing import Any

from bitwright.errors import suggest


class ConfigDict(dict[str, Any]):
    """A dict whose keys are also attributes: ``cfg.quant_transformer.quan_policy["Conv2d"]``."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the config has no {name!r}{suggest(name, [k for k in self if isinstance(k, str)])}")

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    @classmethod
    def of(cls, value: object) -> Any:
        """The same settings, every mapping in them as one of this class."""
        if isinstance(value, Mapping):
            return cls({key: cls.of(item) for key, item in value.items()})
        return type(value)(map(cls.of, value)) if isinstance(value, list | tuple) else value


def plain(value: object) -> Any:
    """The same settings in plain dicts."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value
