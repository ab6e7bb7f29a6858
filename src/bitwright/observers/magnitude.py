"""MagnitudeObserver: one symmetric range from a histogram of |x|, chosen by entropy, error or percentile.

    entropy     the threshold that loses the least information     ``search/entropy.py``
    mse         the threshold with the least squared error         ``search/threshold.py``
    percentile  the magnitude that a share of the values does not exceed

Its options have the names and meaning of those of NVIDIA's histogram calibrator: ``num_bins`` bins span [0, max |x|],
thresholds are tried from bin ``start_bin`` on, every ``stride`` bins. The histogram itself has at least as many bins.
"""

from torch import Tensor

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.observers.base import register_observer
from bitwright.observers.histogram_base import HistogramBase
from bitwright.observers.search.entropy import least_divergence
from bitwright.observers.search.floating import refuse_floating
from bitwright.observers.search.threshold import least_error_top, shares
from bitwright.observers.state.streaming import StreamingHistogram
from bitwright.spec import PerTensor, QuantSpec

CHOICES = ("entropy", "mse", "percentile")


@register_observer("MagnitudeObserver", aliases=("magnitude", "amax_histogram"))
class MagnitudeObserver(HistogramBase):
    """Finds the largest magnitude to represent; the order of batches does not matter.

    Args:
        choice: ``"entropy"``, ``"mse"`` or ``"percentile"``.
        num_bins: bins that thresholds are counted in.
        start_bin: the first bin to try (entropy and mse).
        stride: try only every so many bins (entropy and mse).
        percentile: share of the values to represent, in percent.
        skip_zeros: leave zeros out, as after a ReLU; for one range per tensor.
    """

    def __init__(
        self,
        spec: QuantSpec,
        choice: str = "entropy",
        num_bins: int = 2048,
        start_bin: int = 128,
        stride: int = 1,
        percentile: float = 99.99,
        skip_zeros: bool = False,
    ) -> None:
        if not 1 <= num_bins <= 2**17:
            raise ConfigError(f"a histogram needs at least 1 bin and at most 2**17, not {num_bins}")
        # At least half of the histogram's span is used, on both sides of zero.
        super().__init__(spec, max(16, 4 << (num_bins - 1).bit_length()))
        if skip_zeros and not isinstance(spec.granularity, PerTensor):
            raise ConfigError(f"skip_zeros is for one range per tensor, not for '{spec}'")
        self.num_bins, self.skip_zeros = num_bins, skip_zeros
        self.choice, self.start_bin, self.stride, self.percentile = choice, start_bin, stride, percentile
        self._check(choice, start_bin, stride, percentile)

    def observe(self, x: Tensor) -> None:
        if self.skip_zeros:
            x = x[x != 0]
        if x.numel():
            super().observe(x)
        else:
            self.batches -= 1  # this one has nothing to see

    def search(self, histogram: StreamingHistogram) -> tuple[Tensor, Tensor]:
        top = self.largest(self.choice, self.start_bin, self.stride, self.percentile)
        return -top, top

    def largest(self, choice: str, start_bin: int = 128, stride: int = 1, percentile: float = 99.99) -> Tensor:
        """Return the largest magnitude to represent, (channels,), by a choice other than the observer's own."""
        self._check(choice, start_bin, stride, percentile)
        magnitudes = self.histogram.folded()
        if choice == "percentile":
            return magnitudes.quantile(percentile / 100)
        if choice == "entropy":
            step = stride / self.num_bins if stride > 1 else 0.0
            return least_divergence(magnitudes, self.spec.qmax + 1, start_bin / self.num_bins, step)
        tops = magnitudes.range()[1].double().unsqueeze(1) * shares(self.num_bins, start_bin, stride)
        return least_error_top(magnitudes, tops, self.spec).to(magnitudes.range()[1])

    def _check(self, choice: str, start_bin: int, stride: int, percentile: float) -> None:
        if choice not in CHOICES:
            raise UnknownNameError(f"Unknown calibration method {choice!r}{suggest(str(choice), CHOICES)}")
        if choice == "entropy":
            refuse_floating("entropy", self.spec)
        if stride < 1 or start_bin < 1:
            raise ConfigError(f"stride and start_bin must be at least 1, not {stride} and {start_bin}")
        if not 0 <= percentile <= 100:
            raise ConfigError(f"Invalid percentile. Must be in range 0 <= percentile <= 100, not {percentile}")
