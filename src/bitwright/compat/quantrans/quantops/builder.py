"""QUANLAYERS: QAT layers by name, a registry in QuanTransformer's manner, and ``build_quanlayer``."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from bitwright.errors import ConfigError, suggest
from bitwright.registry import Registry

C = TypeVar("C", bound=type[nn.Module])
_OWN = "bitwright.compat.quantrans."


class LayerRegistry(Registry[type[nn.Module]]):
    """Classes by name. A user's class replaces one of Bitwright's of the same name; two user classes are an error."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._replaced: dict[str, type[nn.Module]] = {}

    def register_module(self, name: str | None = None, force: bool = False, module: Any = None) -> Any:
        """Register a layer class under its own name, or under ``name``; with ``module``, immediately.

        ::

            @QUANLAYERS.register_module()
            class DSQConvV2(nn.Conv2d): ...

        Args:
            name: the name, if not the class's.
            force: replace another user's class.
            module: the class, if this is not used as a decorator.
        """
        if name is not None and not isinstance(name, str):
            raise ConfigError(
                f"the name of a {self.kind} must be a str, not {name!r}: write register_module(), with brackets"
            )

        def decorate(cls: C) -> C:
            if not isinstance(cls, type) or not issubclass(cls, nn.Module):
                raise ConfigError(f"a {self.kind} must be a class derived from nn.Module, not {cls!r}")
            key = name or cls.__name__
            present = self._items.get(key)
            gives_way = present is not None and present.__module__.startswith(_OWN) and key not in self._replaced
            self.register(key, override=force or gives_way)(cls)
            if present is not None and gives_way:
                self._replaced[key] = present
            return cls

        return decorate if module is None else decorate(module)

    def unregister(self, name: str) -> None:
        """Remove ``name``; a replaced class of Bitwright is restored."""
        super().unregister(name)
        if name in self._replaced:
            self._items[name] = self._replaced.pop(name)

    def class_of(self, cfg: object, where: str = "") -> type[nn.Module]:
        """The class that ``cfg["type"]`` names, or is."""
        if not isinstance(cfg, Mapping) or "type" not in cfg:
            raise ConfigError(f"{where}a {self.kind} needs a dict with the key 'type', not {cfg!r}")
        wish = cfg["type"]
        return wish if isinstance(wish, type) else self.get(wish)

    def build(self, cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> nn.Module:
        """Make what ``cfg["type"]`` names (or is, a class) with the rest of ``cfg`` as its arguments."""
        cls = self.class_of(cfg)
        args = {key: value for key, value in {**(default_args or {}), **cfg}.items() if key != "type"}
        parameters = inspect.signature(cls).parameters
        unknown = next((key for key in args if key not in parameters), None)
        if unknown is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ConfigError(
                f"the {self.kind} {cls.__name__} has no argument {unknown!r}{suggest(str(unknown), parameters)}"
            )
        try:
            return cls(**args)
        except TypeError as error:
            raise ConfigError(f"the {self.kind} {cls.__name__} cannot be built: {error}") from error


QUANLAYERS = LayerRegistry("quantized layer")


def build_quanlayer(cfg: Mapping[str, Any], default_args: Mapping[str, Any] | None = None) -> nn.Module:
    """Make a layer of ``QUANLAYERS``: ``build_quanlayer(dict(type="LSQConv2d", in_channels=3, …, num_bit_w=4))``."""
    return QUANLAYERS.build(cfg, default_args)
