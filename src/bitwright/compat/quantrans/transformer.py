"""Model transformers: replace a model's layers by quantized ones, by class and by name."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from bitwright.compat.keys import check_names, section
from bitwright.compat.quantrans.builder import QUANTRANSFORMERS
from bitwright.compat.quantrans.quantops.builder import QUANLAYERS
from bitwright.compat.quantrans.replace import quantized_twin
from bitwright.compat.quantrans.special import SpecialLayers
from bitwright.errors import ConfigError, UnknownNameError, nearest, shortened, suggest
from bitwright.module_swap import swap_in

_log = logging.getLogger(__name__)
_ARGUMENTS = ("quan_policy", "special_layers")


class Basemtransformer(nn.Module):
    """A callable that quantizes the layers of a model, in the model itself.

    A subclass fills, in its constructor:

    Attributes:
        register_dict: for each layer class, the dict that describes its quantized layer.
        special_layers: layers by name with their own dicts, or None.
    """

    layer_idx = 0
    register_dict: Mapping[type[nn.Module], Mapping[str, Any]]
    special_layers: Any

    def forward(
        self,
        model: nn.Module,
        exclude_layers: Iterable[str] = (),
        logger: logging.Logger | None = None,
    ) -> nn.Module:
        """Quantize ``model`` and return it; if anything is refused, nothing in it has changed.

        Args:
            model: the float model; its layers are replaced in place, their Parameters stay the same objects.
            exclude_layers: names of layers (or of modules, including everything inside) to leave alone.
            logger: gets a message for every layer.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
        wishes = self.wishes(model, exclude_layers)
        if not wishes:
            raise ConfigError(self._nothing(model))
        twins = {layer: quantized_twin(layer, args, name or "the model") for layer, (name, args) in wishes.items()}
        for layer, (name, _) in wishes.items():
            (logger or _log).info("%s: %s becomes %s", name, type(layer).__name__, type(twins[layer]).__name__)
        self.layer_idx += len(twins)
        return swap_in(model, twins)

    def wishes(
        self, model: nn.Module, exclude_layers: Iterable[str] = ()
    ) -> dict[nn.Module, tuple[str, Mapping[str, Any]]]:
        """For every layer to be replaced, its name and the dict that describes the quantized layer."""
        special = SpecialLayers.read(self.special_layers)
        names = dict(model.named_modules(remove_duplicate=False))
        del names[""]
        excluded = [exclude_layers] if isinstance(exclude_layers, str) else list(exclude_layers)
        _check_layers(special, excluded, names)
        found: dict[nn.Module, tuple[str, Mapping[str, Any]]] = {}
        for name, module in (names or {"": model}).items():
            args = special.get(name) or self.register_dict.get(type_before_parametrizations(module))
            if args is None or _inside(name, excluded):
                continue
            before = found.setdefault(module, (name, args))
            if before[1] != args and (name in special) == (before[0] in special):
                raise ConfigError(f"{before[0]!r} and {name!r} are one layer: they cannot become two kinds of layer")
            if name in special:
                found[module] = (name, args)
        return found

    def _nothing(self, model: nn.Module) -> str:
        wanted = ", ".join(cls.__name__ for cls in self.register_dict) or "nothing"
        present = Counter(type(m).__name__ for m in model.modules() if not any(m.children()))
        has = ", ".join(f"{count} {name}" for name, count in present.most_common(8))
        return f"no layer of the model is replaced: quan_policy names {wanted}, the model has {has}"


def _check_layers(special: Iterable[str], excluded: list[str], names: Iterable[str]) -> None:
    check_names("exclude_layers", excluded, names)
    check_names("special_layers", special, names)
    for name in special:
        if _inside(name, excluded):
            raise ConfigError(f"{name!r} is in special_layers and in exclude_layers: it cannot be both")


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@QUANTRANSFORMERS.register_module()
class mTransformerV2(Basemtransformer):
    """Replaces layers by the name of their class, and single layers by their own name.

    Args:
        quan_policy: for the name of a class of ``torch.nn``, the dict that describes its quantized layer:
            ``dict(Conv2d=dict(type="LSQConv2d", num_bit_w=4, num_bit_a=4))``.
        special_layers: ``layers_name``, a list of names, and ``convert_type``, a list of as many such dicts.
        kwargs: other settings of a config; without effect, which is logged.

    Attributes:
        layer_idx: the number of layers replaced.
    """

    def __init__(
        self,
        quan_policy: Mapping[str, Mapping[str, Any]] | None = None,
        special_layers: object = None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        wrong = next((key for key in kwargs if nearest(key, _ARGUMENTS)), None)
        if wrong is not None:
            raise ConfigError(f"{type(self).__name__} has no argument {wrong!r}{suggest(wrong, _ARGUMENTS)}")
        if kwargs:
            _log.warning("%s does not use %s", type(self).__name__, shortened(", ".join(kwargs), 300))
        self.special_layers = SpecialLayers.read(special_layers)
        policy = section("quan_policy", quan_policy)
        self.register_dict = OrderedDict((_layer_class(name), args) for name, args in policy.items())
        for where, args in [*policy.items(), *self.special_layers.items()]:
            QUANLAYERS.class_of(args, f"{where!r}: ")


def _layer_class(name: str) -> type[nn.Module]:
    known = {n: c for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    if name not in known:
        raise UnknownNameError(f"quan_policy: torch.nn has no layer {name!r}{suggest(str(name), known)}")
    return known[name]


@QUANTRANSFORMERS.register_module()
class QuanTransformer(mTransformerV2):
    """:class:`mTransformerV2` by the name it had in the code."""
