"""HistogramCalibrator: a histogram of magnitudes, from which amax is chosen to lose little."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitwright.calib.base import Calibrator
from bitwright.calib.choose import CHOICES, by_entropy, by_mse, by_percentile
from bitwright.errors import CalibrationError, ConfigError, UnknownNameError, suggest

_log = logging.getLogger(__name__)
MOST_GROWTH = 8  # above this many times the wished bins, neighbours are joined


class HistogramCalibrator(Calibrator):
    """Keeps a histogram of ``|x|`` that grows with the data.

    Bins of the first batch's width are added while they are few; a range that grows far beyond the first batch joins
    neighbouring bins, which keeps every count right.

    Args:
        num_bits: as in :class:`Calibrator`.
        axis: None: a histogram is of the whole tensor.
        unsigned: as in :class:`Calibrator`.
        num_bins: bins for the range of the first batch.
        grow_method: nothing; older code gives it.
        skip_zeros: leave zeros out, as after a ReLU.
        torch_hist: nothing; older code gives it.
    """

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | Sequence[int] | None = None,
        unsigned: bool = False,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if axis is not None:
            raise NotImplementedError(
                f"Calibrator histogram collection only supports per tensor scaling, not axis {axis}"
            )
        if num_bins < 1:
            raise ConfigError(f"a histogram needs at least 1 bin, not {num_bins}")
        if grow_method is not None:
            _log.warning("grow_method is deprecated and ignored: histograms grow by themselves")
        self._wished_bins, self._skip_zeros = num_bins, skip_zeros
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._calib_hist: Tensor | None = None
        self._calib_bin_edges: Tensor | None = None
        self._zeros = 0
        self.batches = 0

    def collect(self, x: Tensor) -> None:
        """Take one tensor into account."""
        x = x.detach().abs().float().reshape(-1)
        if self._skip_zeros:
            x = x[x != 0]
        if not x.numel():
            return
        top = x.max()
        if not bool(torch.isfinite(top)):
            raise CalibrationError("NaN or infinity was seen by the HistogramCalibrator")
        self.batches += 1
        if float(top) == 0:  # no width yet, or none needed
            self._count_zeros(x.numel())
            return
        if self._calib_hist is None or self._calib_bin_edges is None:
            self._calib_hist = torch.histc(x, bins=self._wished_bins, min=0, max=float(top))
            self._calib_bin_edges = torch.linspace(0, float(top), self._wished_bins + 1)
            self._count_zeros(self._zeros)
            return
        hist, edges = _grow(self._calib_hist, self._calib_bin_edges, float(top), self._wished_bins)
        self._calib_hist = hist + torch.histc(x, bins=hist.numel(), min=0, max=float(edges[-1])).to(hist)
        self._calib_bin_edges = edges

    def _count_zeros(self, count: int) -> None:
        if self._calib_hist is None:
            self._zeros += count
        else:
            self._calib_hist[0] += count

    def compute_amax(
        self, method: str = "entropy", *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """Choose amax.

        Args:
            method: ``"entropy"`` loses least information, ``"mse"`` has the smallest error,
                ``"percentile"`` keeps a share.
            stride: try only every so many bins (entropy and mse).
            start_bin: the first bin to try (entropy and mse).
            percentile: how many per cent of the values to represent.

        Returns:
            amax, or None if nothing was seen.
        """
        if method not in CHOICES:
            raise UnknownNameError(f"Unknown calibration method {method!r}{suggest(str(method), CHOICES)}")
        if self._calib_hist is None or self._calib_bin_edges is None:
            return torch.tensor(0.0) if self._zeros else None
        hist, edges = self._calib_hist.double().cpu(), self._calib_bin_edges.cpu()
        if method == "percentile":
            return by_percentile(hist, edges, percentile)
        choose = by_entropy if method == "entropy" else by_mse
        return choose(hist, edges, self._num_bits, self._unsigned, stride, start_bin)

    def reach(self) -> Tensor | None:
        """The end of the histogram."""
        if self._calib_bin_edges is not None:
            return self._calib_bin_edges[-1]
        return torch.tensor(0.0) if self._zeros else None


def _grow(hist: Tensor, edges: Tensor, top: float, wished: int) -> tuple[Tensor, Tensor]:
    """Make the histogram reach ``top``: by more bins of the same width, or by wider ones if that were too many."""
    if top <= float(edges[-1]):
        return hist, edges
    width = float(edges[-1]) / hist.numel()
    if math.ceil(top / width) > MOST_GROWTH * wished:
        joined = 2 ** math.ceil(math.log2(top) - math.log2(wished * width))
        short = min(joined, 2 ** math.ceil(math.log2(hist.numel())))  # more than all bins is all of them
        hist = torch.nn.functional.pad(hist, (0, -hist.numel() % short)).reshape(-1, short).sum(1)
        width *= joined
    count = max(math.ceil(top / width), hist.numel())
    edges = torch.arange(count + 1, dtype=torch.float64).mul_(width).float()
    while float(edges[-1]) < top:  # rounding
        count += 1
        edges = torch.arange(count + 1, dtype=torch.float64).mul_(width).float()
    return torch.nn.functional.pad(hist, (0, count - hist.numel())), edges
