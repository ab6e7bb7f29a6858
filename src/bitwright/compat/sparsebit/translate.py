"""Sparsebit's config as a recipe, and the parts that have no place in a recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.backends import Backend, find_backend
from bitwright.compat.keys import flag, items, translating
from bitwright.compat.sparsebit.defaults import SCHEDULE
from bitwright.compat.sparsebit.quantization.quant_config import parse_qconfig
from bitwright.compat.sparsebit.specific import read_specific
from bitwright.compat.sparsebit.tensors import read_tensor
from bitwright.errors import ConfigError
from bitwright.nn.operators import operator_of_source
from bitwright.nn.registry import QMODULES, is_custom
from bitwright.recipe import Recipe, Rule


def to_recipe(config: str | Path | Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of a config, and notes on what ``bw.prepare`` takes in another way, or not at all."""
    cfg = parse_qconfig(config)
    with translating("the config", cfg):
        return _translate(cfg)


def _translate(cfg: Any) -> tuple[Recipe, list[str]]:
    if not isinstance(cfg.BACKEND, str):
        raise ConfigError(f"BACKEND must be the name of a target, not {cfg.BACKEND!r}")
    backend = find_backend(cfg.BACKEND)
    switches = {name: flag(f"SCHEDULE.{name}", value) for name, value in cfg.SCHEDULE.items()}
    schedules = {name.lower(): on for name, on in switches.items() if name not in SCHEDULE}
    if not switches["FUSE_BN"]:
        schedules["fold_batchnorm"] = False
    rules = [*_arithmetic(cfg, backend), *read_specific(cfg.W, cfg.A)]
    recipe = Recipe(
        backend=backend.name,
        weight=read_tensor("W", cfg.W),
        activation=read_tensor("A", cfg.A),
        rules=tuple(rules),
        schedules=schedules,
        leaves=tuple(str(name) for name in items("SKIP_TRACE_MODULES", cfg.SKIP_TRACE_MODULES)),
    )
    return recipe, _notes(cfg, switches)


def _arithmetic(cfg: Any, backend: Backend) -> list[Rule]:
    """Arithmetic that Sparsebit quantizes: sums if configured; in simulation, no difference, product or quotient."""
    quantizes_sums = flag("A.QADD.ENABLE_QUANT", cfg.A.QADD.ENABLE_QUANT)
    known = [name for name in ("sub", "mul", "div") if name in backend.operators.integer]
    left = [name for name in known if backend.name == "virtual" and not _has_own_module(name)]
    rules = [Rule(match=f"op:{name}", skip=True, optional=True) for name in left]
    if quantizes_sums == ("add" in backend.operators.integer):
        return rules
    return [*rules, Rule(match="op:add", optional=True, force=quantizes_sums, skip=not quantizes_sums)]


def _has_own_module(name: str) -> bool:
    """Whether the user has registered a QModule for an operator."""
    sources = (operator_of_source(source) for source, cls in QMODULES.items() if is_custom(cls))
    return any(operator is not None and operator.name == name for operator in sources)


def _notes(cfg: Any, switches: Mapping[str, bool]) -> list[str]:
    notes = []
    if not switches["DISABLE_UNNECESSARY_QUANT"]:
        notes.append("SCHEDULE.DISABLE_UNNECESSARY_QUANT: False: what a backend fuses has no quantizer in between")
    if switches["BN_TUNING"]:
        notes.append("SCHEDULE.BN_TUNING: re-estimating BatchNorm statistics is not part of preparing a model")
    if cfg.DEVICE:
        notes.append(f"DEVICE: move the model to {cfg.DEVICE!r}")
    return notes
