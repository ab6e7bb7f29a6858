"""``ptq_reconstruction``: AdaRound, BRECQ and QDrop, as MQBench configures them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bitwright.compat.keys import section
from bitwright.compat.mqbench.utils.state import enable_quantization
from bitwright.errors import ConfigError
from bitwright.reconstruction import reconstruct

_KEYS = {
    "pattern": "layer",
    "scale_lr": None,
    "warm_up": 0.2,
    "weight": 0.01,
    "max_count": 20000,
    "b_range": (20, 2),
    "keep_gpu": True,
    "round_mode": "learned_hard_sigmoid",
    "prob": 1.0,
    "exclude_node_prefix": (),
    "exclude_node": (),
}
_MANY = 10000  # from so many steps on, the papers' smaller learning rate


def ptq_reconstruction(
    model: nn.Module, cali_data: Iterable[Any], config: object, graph_module_list: object = None
) -> nn.Module:
    """Learn how the weights of a calibrated model are rounded, and return it, quantizing.

    Args:
        model: a prepared model that has seen calibration data.
        cali_data: batches to learn with.
        config: a mapping, or an object with attributes: ``pattern`` (layer or block), ``max_count``, ``warm_up``,
            ``b_range``, ``prob`` (below 1 it is QDrop), ``scale_lr`` (whether scales of activations are learned, too).
            Strengths and learning rates are Bitwright's own, which are relative: see ``bw.reconstruct``.
        graph_module_list: for parts of a model; give the parts themselves instead.
    """
    if graph_module_list is not None:
        raise ConfigError("ptq_reconstruction does not take graph_module_list")
    given = _read(config)
    learned = "brecq" if given["scale_lr"] else "adaround"
    enable_quantization(model)
    reconstruct(
        model,
        list(cali_data),
        "qdrop" if given["prob"] < 1 else learned,  # pyrefly: ignore
        given["pattern"],
        steps=given["max_count"],
        lr=1e-3 if given["max_count"] >= _MANY else 1e-2,
        warmup=given["warm_up"],
        beta=tuple(given["b_range"]),
        keep=given["prob"],
    )
    return model


def _read(config: object) -> dict[str, Any]:
    told = config if isinstance(config, Mapping) else {k: getattr(config, k) for k in _KEYS if hasattr(config, k)}
    given = {**_KEYS, **section("the reconstruction's config", told, _KEYS)}
    for key in ("exclude_node", "exclude_node_prefix"):
        if given[key]:
            raise ConfigError(f"ptq_reconstruction does not take {key}")
    if given["pattern"] not in ("layer", "block") or given["round_mode"] != _KEYS["round_mode"]:
        raise ConfigError(f"pattern must be layer or block, round_mode {_KEYS['round_mode']}; the config says {given}")
    return given
