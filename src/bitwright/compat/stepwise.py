"""Step-by-step calibration, as in the older toolkits: observe while the user runs batches, then fix the ranges."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bitwright.calibration import make_room_for_bias
from bitwright.distributed import all_ranks
from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import WeightSite, weight_sites
from bitwright.observer_state import merge_over_ranks
from bitwright.quantizer import Mode, TensorQuantizer, quantizers
from bitwright.torch_internals import remove_pre_hook

_AWAITING = "bitwright_awaits_weight"


def split_quantizers(model: nn.Module) -> tuple[dict[str, TensorQuantizer], dict[str, TensorQuantizer]]:
    """The quantizers of weights and of activations, separately, without those that the user switched off."""
    found = {name: q for name, q in quantizers(model).items() if q.enabled}
    if not found:
        raise ConfigError(f"this {type(model).__name__} has no quantizer: prepare it first")
    of_weights = {n: q for n, q in found.items() if "._weight_quantizer" in f".{n}"}
    return of_weights, {n: q for n, q in found.items() if n not in of_weights}


def all_quantizers(model: nn.Module) -> list[TensorQuantizer]:
    """The quantizers of weights and activations, without those that the user switched off."""
    return [q for part in split_quantizers(model) for q in part.values()]


def stop(chosen: Iterable[TensorQuantizer]) -> None:
    """Pass tensors through; keep what observers have seen."""
    for quantizer in chosen:
        _follow(quantizer, False)
        quantizer.off()


def watch(model: nn.Module, chosen: Iterable[TensorQuantizer]) -> None:
    """From now on observe activations, and weights once ranges are fixed."""
    of_layers = {site.quantizer for site in _sites(model)}
    for quantizer in chosen:
        stop([quantizer])
        if quantizer in of_layers:
            quantizer.__dict__[_AWAITING] = True
        else:
            quantizer.observe()


def follow(chosen: Iterable[TensorQuantizer]) -> None:
    """Find ranges again from each tensor and all before it, and quantize with them."""
    for quantizer in chosen:
        _follow(quantizer, True)
        quantizer.mode = Mode.QUANTIZE


def fix_ranges(model: nn.Module) -> None:
    """Turn observations into ranges; under ``torchrun``, those of all ranks."""
    with torch.no_grad():
        seen = {name: q for name, q in quantizers(model).items() if q.observer.batches}
        if seen:
            with all_ranks() as ranks:
                merge_over_ranks(ranks, seen)
        for site in _sites(model):
            if site.quantizer.__dict__.pop(_AWAITING, False):
                site.quantizer.observer.reset()
                site.quantizer.observer(site.weight())
        for quantizer in quantizers(model).values():
            if quantizer.observer.batches:
                quantizer.compute_qparams()
                quantizer.observer.reset()


def quantize(model: nn.Module, chosen: Iterable[TensorQuantizer]) -> None:
    """Quantize with the known ranges; if one is unknown, switch nothing."""
    ready = list(chosen)
    for quantizer in sorted(ready, key=lambda q: q.calibrated):  # one without a range comes first and is refused
        _follow(quantizer, False)
        quantizer.quantize()
    for site in _sites(model):
        if site.quantizer.calibrated:
            make_room_for_bias(site.layer)


def _sites(model: nn.Module) -> list[WeightSite]:
    """The layers with one weight; others, such as an LSTM, show theirs when they run."""
    return [site for site in weight_sites(model) if site.plain]


def _refresh(quantizer: Any, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        quantizer.observer(args[0].detach())
        quantizer.compute_qparams()


def _follow(quantizer: TensorQuantizer, on: bool) -> None:
    was_on = remove_pre_hook(quantizer, _refresh)
    if on:
        quantizer.register_forward_pre_hook(_refresh)
    elif was_on:
        quantizer.observer.reset()
