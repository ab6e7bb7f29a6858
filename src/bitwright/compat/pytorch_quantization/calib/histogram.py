"""The calibrator by histograms, and that of weights, with the old numbers.

    entropy     the cut of the histogram whose quantized counts diverge least from all counts; of equals the last
    mse         the centre of a bin which, as amax, gives the centres of all bins the least squared error
    percentile  the lower edge of the bin that a share of the values reaches

Bitwright's own (``bitwright.quantizer.calibrators``) do not depend on the order of batches, and find other thresholds.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.compat.pytorch_quantization.tensor_quant import FP8, fake_tensor_quant
from bitwright.errors import CalibrationError, ConfigError, suggest
from bitwright.nn.weight_sites import weight_sites
from bitwright.observers.magnitude import CHOICES
from bitwright.observers.search.floating import refuse_floating
from bitwright.quantizer.calibrators import Axes, Bits, Calibrator, bits_of, refuse_axis
from bitwright.spec import PerChannel, PerTensor

_MOST = 2**15  # bins: more, where the first batch was tiny, are joined in pairs
_CHUNK = 2**22  # errors computed at once
Histogram = tuple[Tensor, Tensor]  # counts (n,), edges (n + 1,)


class HistogramCalibrator(Calibrator):
    """Keeps a histogram of ``|x|``, from which amax is chosen to lose little.

    The first batch sets the width of the bins; a larger value adds bins.

    Args:
        num_bits: as in ``Calibrator``.
        axis: None: a histogram is of the whole tensor.
        unsigned: as in ``Calibrator``.
        num_bins: bins of the first batch.
        grow_method: ignored; older code gives it.
        skip_zeros: leave zeros out, as after a ReLU.
        torch_hist: ignored: what it chose between counts alike.
    """

    kept = ("_calib_hist", "_calib_bin_edges", "_zeros", "_spoilt")

    def __init__(
        self,
        num_bits: Bits = 8,
        axis: Axes = None,
        unsigned: bool = False,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        refuse_axis(axis, grow_method)
        if not 1 <= num_bins <= _MOST:
            raise ConfigError(f"a histogram needs at least 1 bin and at most {_MOST}, not {num_bins}")
        super().__init__(num_bits, axis, unsigned)
        self._num_bins, self._skip_zeros = num_bins, skip_zeros
        self._calib_hist: Tensor | None = None
        self._calib_bin_edges: Tensor | None = None
        self._zeros = 0  # seen before there was a width
        self._spoilt = 0  # values that are not finite

    def observe(self, x: Tensor) -> None:
        x = x.abs().float()
        if self._skip_zeros:
            x = x[x != 0]
        odd = int(x.numel() - x.isfinite().sum())
        if odd or not x.numel():
            self._spoilt += odd
            self.batches -= not x.numel()
        elif not (top := x.max()):
            self._zeros += x.numel()
        else:
            counts, edges = self._reaching(top)
            counts += torch.histc(x, counts.numel(), 0, float(edges[-1]))
            counts[0] += self._zeros
            self._zeros = 0

    def _reaching(self, top: Tensor) -> Histogram:
        """The histogram, with bins up to ``top`` at least."""
        if self._calib_hist is None or self._calib_bin_edges is None:
            self._calib_bin_edges = torch.linspace(0, float(top), self._num_bins + 1, device=top.device)
            self._calib_hist = torch.zeros(self._num_bins, device=top.device)
        counts, edges = self._calib_hist, self._calib_bin_edges
        width = edges[1]
        while top / width > _MOST:
            counts = nn.functional.pad(counts, (0, counts.numel() % 2)).view(-1, 2).sum(1)
            width, edges = width * 2, torch.zeros_like(edges[:1])
        if top > edges[-1]:
            bins = max(int((top / width).ceil()), counts.numel())
            edges = torch.arange(bins + 1, device=top.device) * width
            counts = nn.functional.pad(counts, (0, bins - counts.numel()))
        self._calib_hist, self._calib_bin_edges, self._num_bins = counts, edges, counts.numel()
        return counts, edges

    def absorb(self, other: Self) -> None:
        self._zeros += other._zeros
        self._spoilt += other._spoilt
        if other._calib_hist is None or other._calib_bin_edges is None:
            return
        counts, edges = self._reaching(other._calib_bin_edges[-1])
        centers = (other._calib_bin_edges[1:] + other._calib_bin_edges[:-1]) / 2
        place = (centers / edges[1]).long().clamp(max=counts.numel() - 1)
        counts.index_add_(0, place, other._calib_hist)

    def seen(self) -> tuple[Tensor, Tensor]:
        top = torch.zeros(()) if self._calib_bin_edges is None else self._calib_bin_edges[-1]
        top = top * torch.nan if self._spoilt else top
        return top, top

    def amax(self) -> Tensor:
        amax = self.compute_amax("entropy" if isinstance(self._num_bits, int) else "mse")
        if amax is None:
            raise CalibrationError("no data was seen")
        return amax

    def compute_amax(
        self, method: str = "entropy", *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """Choose amax, or None if nothing was seen.

        Args:
            method: ``"entropy"`` loses least information, ``"mse"`` has the smallest error,
                ``"percentile"`` keeps a share.
            stride: try only every so many bins (entropy and mse).
            start_bin: the first bin to try (entropy and mse).
            percentile: how many per cent of the values to represent.
        """
        _check_options(method, stride, start_bin, percentile)
        if method == "entropy":
            refuse_floating("entropy", self.spec)
        if self._spoilt:
            raise CalibrationError("NaN or infinity was seen")
        if self._calib_hist is None or self._calib_bin_edges is None:
            return torch.zeros(()) if self.batches else None
        found: Histogram = self._calib_hist, self._calib_bin_edges
        if method == "percentile":
            return by_percentile(found, percentile)
        if start_bin >= found[0].numel():
            raise ConfigError(f"start_bin {start_bin} is beyond the {found[0].numel()} bins: give a lower one")
        choose = by_entropy if method == "entropy" else by_error
        return choose(found, self._num_bits, self._unsigned, stride, start_bin)


def _check_options(method: str, stride: int, start_bin: int, percentile: float) -> None:
    if method not in CHOICES:
        raise TypeError(f"Unknown calibration method {method!r}{suggest(str(method), CHOICES)}")
    if not 0 <= percentile <= 100:
        raise ConfigError(f"Invalid percentile. Must be in range 0 <= percentile <= 100, not {percentile}")
    if stride < 1 or start_bin < 1:
        raise ConfigError(f"stride and start_bin must be at least 1, not {stride} and {start_bin}")


def by_percentile(histogram: Histogram, percentile: float) -> Tensor:
    """The lower edge of the bin at which the share of the values is reached."""
    counts, edges = histogram
    share = torch.cumsum(counts.double() / counts.double().sum(), 0)
    return edges[int(torch.searchsorted(share, percentile / 100))].clone()


def by_error(
    histogram: Histogram, num_bits: Bits, unsigned: bool = False, stride: int = 1, start_bin: int = 128
) -> Tensor:
    """The centre of a bin that, as amax, has the least mean squared error over the centres of all bins."""
    counts, edges = histogram
    centers = (edges[1:] + edges[:-1]) / 2
    if isinstance(num_bits, tuple):
        rounded: Callable[..., Tensor] = FP8[num_bits]
    else:
        rounded = lambda x, amax: fake_tensor_quant(x, amax, num_bits, unsigned)  # noqa: E731
    tried = centers[start_bin::stride].unsqueeze(1)  # (thresholds, 1)
    chunks = tried.split(max(1, _CHUNK // counts.numel()))
    errors = torch.cat([((rounded(centers.expand(len(c), -1), c) - centers) ** 2 * counts).mean(1) for c in chunks])
    return tried[errors.argmin(), 0].clone()


def by_entropy(histogram: Histogram, num_bits: Any, unsigned: bool, stride: int = 1, start_bin: int = 128) -> Tensor:
    """The upper edge of the first bins which, quantized, diverge least from the whole histogram; of equals the last."""
    counts = histogram[0].double().cpu().numpy()
    counts[0] = counts[1]
    levels = 2 ** (num_bits - 1 + int(unsigned))
    divergences = [_divergence(counts, cut, levels) for cut in range(start_bin, len(counts) + 1, stride)]
    last = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    return histogram[1][start_bin + last * stride].clone()


def _divergence(counts: np.ndarray, cut: int, levels: int) -> float:
    """Kullback and Leibler's divergence of the first bins at so many levels from all bins, the rest in the last one."""
    kept = counts[:cut]
    reference = kept.copy()
    reference[-1] += counts[cut:].sum()
    level = np.arange(cut) * levels // cut
    present = kept > 0
    spread = np.bincount(level, kept, levels) / np.maximum(np.bincount(level, present, levels), 1)
    candidate = np.where(present, spread[level], 0.0)
    p, q = reference / reference.sum(), candidate / candidate.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(p > 0, p * np.log(p / q), 0.0).sum())


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
    if method not in ("max", "mse", "percentile"):
        raise TypeError(f"Unsupported calibration method {method!r}{suggest(str(method), ('max', *CHOICES[1:]))}")
    for site in weight_sites(model):
        weight, quantizer = site.weight().detach(), site.quantizer
        grain = PerChannel(site.channel_axis) if perchannel else PerTensor()
        if quantizer.spec.granularity != grain:
            quantizer.forget_range()
            quantizer.change_spec(quantizer.spec.with_(granularity=grain))
        rows = weight.movedim(site.channel_axis, 0).flatten(1) if perchannel else weight.reshape(1, -1)
        amax = torch.stack([_of_row(row, method, percentile, num_bins, quantizer.spec) for row in rows])
        shape = [-1 if d == site.channel_axis else 1 for d in range(weight.ndim)] if perchannel else ()
        quantizer.set_amax(amax.reshape(shape))


def _of_row(row: Tensor, method: str, percentile: float, bins: int, spec: Any) -> Tensor:
    if method == "max":
        return row.abs().amax()
    calibrator = HistogramCalibrator(bits_of(spec), None, not spec.format.signed, bins)
    calibrator.collect(row)
    start = {} if bins > 128 else {"start_bin": max(1, bins // 16)}
    amax = calibrator.compute_amax(method, percentile=percentile, **start)
    return row.abs().amax() if amax is None else amax


__all__ = ["HistogramCalibrator", "calibrate_weights"]
