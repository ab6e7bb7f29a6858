"""The calibrator by histograms, and that of weights."""

import torch
from torch import nn

from bitwright.errors import suggest
from bitwright.nn.weight_sites import weight_sites
from bitwright.observers.magnitude import MagnitudeObserver
from bitwright.observers.minmax import MinMaxObserver
from bitwright.quantizer.calibrators import HistogramCalibrator
from bitwright.spec import PerChannel, PerTensor

_METHODS = ("max", "mse", "percentile")


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
    if method not in _METHODS:
        raise TypeError(f"Unsupported calibration method {method!r}{suggest(str(method), _METHODS)}")
    for site in weight_sites(model):
        weight, quantizer = site.weight().detach(), site.quantizer
        grain = PerChannel(site.channel_axis) if perchannel else PerTensor()
        if quantizer.spec.granularity != grain:
            quantizer.forget_range()
            quantizer.change_spec(quantizer.spec.with_(granularity=grain))
        options = {"choice": method, "percentile": percentile, "num_bins": num_bins}
        observer = MinMaxObserver(quantizer.spec) if method == "max" else MagnitudeObserver(quantizer.spec, **options)
        observer(weight)
        amax = torch.maximum(*(end.abs() for end in observer.range()))
        shape = [-1 if d == site.channel_axis else 1 for d in range(weight.ndim)] if perchannel else ()
        quantizer.set_amax(amax.reshape(shape))


__all__ = ["HistogramCalibrator", "calibrate_weights"]
