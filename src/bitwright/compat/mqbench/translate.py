"""MQBench's ``extra_config`` as a recipe, and the parts that have no place in a recipe."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bitwright.backends import BACKENDS
from bitwright.compat.keys import items, section, translating
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.fuse import read_fusions
from bitwright.compat.mqbench.fuser_method_mappings import Chain, Fuse
from bitwright.compat.mqbench.qconfig import read_qconfig
from bitwright.compat.mqbench.selection import added_type, read_selection
from bitwright.errors import ConfigError
from bitwright.graph.capture.leaves import spell
from bitwright.recipe import Recipe
from bitwright.validation import shown

KEYS = [
    "extra_qconfig_dict",
    "extra_quantizer_dict",
    "preserve_attr",
    "extra_fuse_dict",
    "concrete_args",
    "concrect_args",  # as spelled in MQBench's documentation
    "leaf_module",
]


@dataclass
class ExtraConfig:
    """A parsed ``extra_config``: the recipe, and further arguments of ``prepare``."""

    recipe: Recipe
    fusions: dict[Chain, Fuse] = field(default_factory=dict)
    modules: dict[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    preserve_attr: dict[str, list[str]] = field(default_factory=dict)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    folds_norms: bool = True


def read_config(backend: BackendType | str, extra_config: object) -> ExtraConfig:
    """Read an ``extra_config`` for a backend; refuse invalid settings."""
    with translating("extra_config", extra_config):
        return _read(BackendType.read(backend), extra_config)


def _read(target: BackendType, extra_config: object) -> ExtraConfig:
    config = section("extra_config", extra_config, KEYS)
    fusions, modules = read_fusions(config.get("extra_fuse_dict"))
    rules = [added_type(cls) for cls in modules] + read_selection(config.get("extra_quantizer_dict"), target)
    academic = bool((config.get("extra_quantizer_dict") or {}).get("academic_mode"))
    recipe = Recipe(
        backend=target.value,
        rules=tuple(rules),
        schedules={"fold_batchnorm": False} if academic else {},
        leaves=tuple(_leaf(cls) for cls in items("leaf_module", config.get("leaf_module", []))),
        **read_qconfig(config.get("extra_qconfig_dict"), target),  # pyrefly: ignore
    )
    return ExtraConfig(
        recipe,
        fusions,
        modules,
        preserve_attr=_preserved(config.get("preserve_attr")),
        concrete_args=_fixed(config),
        folds_norms=BACKENDS.get(target.value).folding.batchnorm and not academic,
    )


def to_recipe(extra_config: object, backend: BackendType | str = BackendType.Academic) -> tuple[Recipe, list[str]]:
    """The recipe of an ``extra_config``, and notes on what ``bw.prepare`` takes in another way, or not at all."""
    read = read_config(backend, extra_config)
    chains = ", ".join("+".join(cls.__name__ for cls in chain) for chain in read.fusions)
    found = {
        f"extra_fuse_dict: the methods that fuse {chains} are code; prepare_by_platform runs them": read.fusions,
        f"additional_qat_module_mapping: register_qmodule the classes for {_names(read.modules)}": read.modules,
        f"preserve_attr: give bw.prepare preserve_attr={shown(read.preserve_attr)}": read.preserve_attr,
        f"concrete_args: give bw.prepare concrete_args={shown(read.concrete_args)}": read.concrete_args,
    }
    return read.recipe, [note for note, given in found.items() if given]


def _names(classes: Iterable[type[nn.Module]]) -> str:
    return ", ".join(cls.__name__ for cls in classes)


def _leaf(cls: object) -> str:
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise ConfigError(f"leaf_module must hold module classes, not {cls!r}")
    return spell(cls)


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    given = [config[key] for key in ("concrete_args", "concrect_args") if config.get(key)]
    if len(given) > 1:
        raise ConfigError("extra_config has both concrete_args and concrect_args: give one")
    return dict(section("concrete_args", given[0] if given else None))


def _preserved(given: object) -> dict[str, list[str]]:
    return {path: items(f"preserve_attr[{path!r}]", names) for path, names in section("preserve_attr", given).items()}
