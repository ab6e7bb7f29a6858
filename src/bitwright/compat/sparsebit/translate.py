"""Sparsebit's config as a recipe, and what of it is no part of a recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.backends import Backend, find_backend
from bitwright.compat.keys import flag, items
from bitwright.compat.sparsebit.defaults import SCHEDULE
from bitwright.compat.sparsebit.quant_config import parse_qconfig
from bitwright.compat.sparsebit.specific import read_specific
from bitwright.compat.sparsebit.tensors import read_tensor
from bitwright.errors import ConfigError
from bitwright.recipe import Recipe, Rule


def to_recipe(config: str | Path | Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of a config, and notes on what is said to ``bw.prepare`` in another way, or not at all."""
    cfg = parse_qconfig(config)
    if not isinstance(cfg.BACKEND, str):
        raise ConfigError(f"BACKEND is the name of a target, not {cfg.BACKEND!r}")
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
    """What Sparsebit quantizes of arithmetic: sums if told to; in simulation, no difference, product or quotient."""
    quantizes_sums = flag("A.QADD.ENABLE_QUANT", cfg.A.QADD.ENABLE_QUANT)
    left = [name for name in ("sub", "mul", "div") if backend.name == "virtual" and name in backend.operators.integer]
    rules = [Rule(match=f"op:{name}", skip=True, optional=True) for name in left]
    if quantizes_sums == ("add" in backend.operators.integer):
        return rules
    return [*rules, Rule(match="op:add", optional=True, force=quantizes_sums, skip=not quantizes_sums)]


def _notes(cfg: Any, switches: Mapping[str, bool]) -> list[str]:
    notes = []
    if not switches["DISABLE_UNNECESSARY_QUANT"]:
        notes.append("SCHEDULE.DISABLE_UNNECESSARY_QUANT: False: what a backend fuses has no quantizer in between")
    if switches["BN_TUNING"]:
        notes.append("SCHEDULE.BN_TUNING: re-estimating BatchNorm statistics is no part of preparing a model")
    if cfg.DEVICE:
        notes.append(f"DEVICE: move the model to {cfg.DEVICE!r}")
    return notes
