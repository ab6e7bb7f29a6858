"""calibrate_weights: amax of every weight in a model."""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calib.choose import by_mse, by_percentile
from bitwright.errors import UnknownNameError, suggest
from bitwright.numerics.amax import reduce_amax

METHODS = ("max", "mse", "percentile")


def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Give every weight quantizer of a model its range.

    Args:
        model: a model with modules that have a ``weight`` and a ``weight_quantizer``.
        method: ``"percentile"``, ``"mse"`` or ``"max"``.
        perchannel: one amax for every output channel, or one for the weight.
        percentile: how many per cent of the values to represent.
        num_bins: bins of the histograms.
    """
    if method not in METHODS:
        raise UnknownNameError(f"Unsupported calibration method {method!r}{suggest(str(method), METHODS)}")
    for module in model.modules():
        quantizer: Any = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if quantizer is None or not isinstance(weight, Tensor):
            continue
        axis = 1 if getattr(module, "transposed", False) else 0
        rows = weight.detach().movedim(axis, 0).flatten(1) if perchannel else weight.detach().reshape(1, -1)
        amax = weight_amax(rows, quantizer.spec.bits, method, percentile, num_bins)
        if perchannel:
            shape = [-1 if d == axis else 1 for d in range(weight.ndim)]
            quantizer.set_amax(amax.reshape(shape))
        else:
            quantizer.set_amax(amax.reshape(()))


def weight_amax(rows: Tensor, num_bits: int, method: str, percentile: float, num_bins: int) -> Tensor:
    """The amax of each row of (channels, values)."""
    if method == "max":
        return reduce_amax(rows, 1, keepdims=False).float()
    return torch.stack([_of_histogram(row, num_bits, method, percentile, num_bins) for row in rows]).to(rows.device)


def _of_histogram(row: Tensor, num_bits: int, method: str, percentile: float, num_bins: int) -> Tensor:
    values = row.abs().float().cpu()
    top = float(values.max())
    if top == 0:
        return torch.tensor(0.0)
    hist = torch.histc(values, bins=num_bins, min=0, max=top).double()
    edges = torch.linspace(0, top, num_bins + 1)
    if method == "percentile":
        return by_percentile(hist, edges, percentile)
    return by_mse(hist, edges, num_bits, unsigned=False)
