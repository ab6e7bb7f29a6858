"""Weight ranges by output error: for each scale, the range that brings the layer's result closest to float.

This is not the range with the least error of the weight itself: inputs after a ReLU are positive, so errors of one sign
add up, and a range that clips shifts the mean of the result. With G = Σ x·xᵀ of the layer's inputs and D the error of
the weight,

    error of a row = D·G·Dᵀ

is tried for shares of the full range and for the current range, and the least wins, so no row gets worse.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calibration import make_room_for_bias
from bitwright.correction.grams import Gram, collected, fit_layers
from bitwright.correction.outcome import Correction
from bitwright.correction.running import Layer
from bitwright.errors import ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.numerics.views import broadcast
from bitwright.observers.base import min_max
from bitwright.quantizer import TensorQuantizer
from bitwright.spec import PerChannel, PerTensor


def fit_weight_ranges(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    least: float = 0.3,
    candidates: int = 71,
    progress: bool | None = None,
) -> Correction:
    """Set weight quantizers to the ranges that bring their layers' results closest to float.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``; a few hundred images.
        least: the smallest share of the full range to try.
        candidates: how many shares to try, from 1 down to ``least``.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the squared error of each layer's result, as a share of the one before.
    """
    if not 0 < least <= 1 or candidates < 1:
        raise ConfigError(f"least must be above 0 and at most 1, and candidates 1 or more, not {least}, {candidates}")
    done = Correction("fit_weight_ranges")
    names = {layer: name for name, layer in fit_layers(model, done).items() if _fits(name, layer, done)}
    parts = torch.linspace(1.0, least, candidates).tolist()
    for layer, gram in collected(model, names, batches, progress):
        done.changed[names[layer]] = _fit(layer, gram, parts)
        make_room_for_bias(layer)
    return done


def _fits(name: str, layer: Layer, done: Correction) -> bool:
    grain = layer.weight_quantizer.spec.granularity
    if isinstance(grain, PerTensor) or (isinstance(grain, PerChannel) and grain.axis % layer.weight.ndim == 0):
        return True
    done.skipped[name] = f"its ranges are not per output channel ('{layer.weight_quantizer.spec}')"
    return False


def _fit(layer: Layer, gram: Gram, parts: list[float]) -> float:
    """Set the best range; return its error as a share of the current range's."""
    quantizer, weight = layer.weight_quantizer, layer.folded_weight()[0].detach()
    lo, hi = min_max(weight, quantizer.spec)
    scale, zero_point = (p.clone() for p in quantizer.qparams())
    before = least = _error(weight, quantizer, gram, scale, zero_point)
    for part in parts:
        tried = scale_and_zero_point(lo * part, hi * part, quantizer.spec)
        error = _error(weight, quantizer, gram, *tried)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero_point = (torch.where(better, new, old) for new, old in zip(tried, (scale, zero_point), strict=True))
    quantizer.set_qparams(scale, zero_point)
    return float(least.sum() / before.sum().clamp(min=1e-300))


def _error(weight: Tensor, quantizer: TensorQuantizer, gram: Gram, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The squared error of the result for each scale."""
    spec, where = quantizer.spec, (quantizer.method.axis, quantizer.method.group)
    s, z = (broadcast(p, weight, *where) for p in (scale, zero_point))
    levels = ((torch.round(weight / s) + z).clamp(spec.qmin, spec.qmax) - z) * s
    errors = gram.error(gram.matrix(levels - weight)).flatten()
    return errors if scale.ndim else errors.sum()
