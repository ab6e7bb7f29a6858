"""Calibrators: observers that answer the largest magnitude to represent, amax, as NVIDIA's toolkit has them."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bitwright.errors import CalibrationError, ConfigError, suggest
from bitwright.observers import Observer
from bitwright.observers.magnitude import CHOICES, MagnitudeObserver
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.spec import QuantSpec

_log = logging.getLogger(__name__)
Bits = int | tuple[int, int]
Axes = int | Sequence[int] | None


class Calibrator(Observer):
    """Collects tensors, then computes amax; a subclass writes ``collect``, ``compute_amax`` and ``reset``.

    Args:
        num_bits: bits of the integers, or (4, 3) or (5, 2) for fp8.
        axis: the axes that keep an amax of their own; None is one for the tensor.
        unsigned: whether the integers start from 0.
        **options: of the observer that it is made from, if any.
    """

    def __init__(self, num_bits: Bits = 8, axis: Axes = None, unsigned: bool = False, **options: Any) -> None:
        described = QuantDescriptor(num_bits, axis=axis, unsigned=unsigned)
        self._axis = described.axis
        super().__init__((described if len(described.axes) < 2 else described.with_(axis=None)).spec, **options)

    @property
    def _num_bits(self) -> Bits:
        return bits_of(self.spec)

    @property
    def _unsigned(self) -> bool:
        return not self.spec.format.signed

    def observe(self, x: Tensor) -> None:
        self.collect(x)

    def collect(self, x: Tensor) -> None:
        """Take one tensor into account, and count it."""
        self(x)

    @abstractmethod
    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The largest magnitude to represent, or None if nothing was seen."""

    def amax(self) -> Tensor:
        """The largest magnitude to represent, or an error that says why there is none."""
        amax = self.compute_amax()
        if amax is None:
            raise CalibrationError("no data was seen")
        if not bool(torch.isfinite(amax).all()):
            raise CalibrationError("NaN or infinity was seen")
        return amax

    def range(self) -> tuple[Tensor, Tensor]:
        amax = self.amax().float().reshape(self.param_shape or ())
        return (torch.zeros_like(amax) if self._unsigned else -amax), amax

    def __repr__(self) -> str:
        axis = "per-tensor" if self._axis is None else f"axis={self._axis}"
        return f"{type(self).__name__}({self._num_bits}bit {axis}, {self.batches} batches)"


class MaxCalibrator(Calibrator):
    """Keeps the largest magnitude, for the tensor or along axes; ``num_bits`` and ``unsigned`` make no difference.

    With ``track_amax`` it also lists that of every tensor, in ``amaxs``.
    """

    kept = ("_calib_amax",)

    def __init__(self, num_bits: Bits = 8, axis: Axes = None, unsigned: bool = False, track_amax: bool = False) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._calib_amax: Tensor | None = None
        self.amaxs: list[Tensor] = []

    def observe(self, x: Tensor) -> None:
        kept = _axes(self._axis, x)
        self._take(reduce_amax(x, [d for d in range(x.ndim) if d not in kept] if kept else None))

    def compute_amax(self) -> Tensor | None:
        return self._calib_amax

    def seen(self) -> tuple[Tensor, Tensor]:
        amax = torch.zeros(()) if self._calib_amax is None else self._calib_amax
        return amax, amax

    def absorb(self, other: Self) -> None:
        if other._calib_amax is not None:
            self._take(other._calib_amax)

    def _take(self, local: Tensor) -> None:
        self._calib_amax = local if self._calib_amax is None else torch.maximum(self._calib_amax, local)
        if self._track_amax:
            self.amaxs.append(local.cpu())


class HistogramCalibrator(Calibrator, MagnitudeObserver):
    """Keeps a histogram of ``|x|``, from which amax is chosen to lose little; it is that of MagnitudeObserver.

    ``grow_method`` and ``torch_hist`` do nothing; older code gives them.
    """

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
        super().__init__(num_bits, axis, unsigned, choice="mse", num_bins=num_bins, skip_zeros=skip_zeros)

    observe = MagnitudeObserver.observe

    def compute_amax(
        self, method: str = "entropy", *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """Choose amax by the options of MagnitudeObserver, or None if nothing was seen."""
        if method not in CHOICES:
            raise TypeError(f"Unknown calibration method {method!r}{suggest(str(method), CHOICES)}")
        if not self.batches:
            return None
        if not self.histogram.finite:
            raise CalibrationError("NaN or infinity was seen")
        return self.largest(method, start_bin, stride, percentile).reshape(())

    @property
    def _calib_hist(self) -> Tensor | None:
        return self._bins()[0] if self.batches else None

    @property
    def _calib_bin_edges(self) -> Tensor | None:
        return self._bins()[1] if self.batches else None

    def _bins(self) -> tuple[Tensor, Tensor]:
        """Counts of magnitudes and the edges of their bins."""
        folded = self.histogram.folded()
        counts, width = folded.counts()
        counts = counts[0, folded.bins // 2 :]
        used = int(counts.nonzero()[-1]) + 1
        return counts[:used], torch.arange(used + 1, device=counts.device) * width


def refuse_axis(axis: Axes, grow_method: str | None) -> None:
    """Refuse a histogram for each channel, and say that ``grow_method`` does nothing."""
    if axis is not None:
        raise NotImplementedError(f"Calibrator histogram collection only supports per tensor scaling, not axis {axis}")
    if grow_method is not None:
        _log.warning("grow_method is deprecated and ignored: histograms grow on their own")


class NoObserver(Observer):
    """Stands where a quantizer has none, and refuses."""

    def observe(self, x: Tensor) -> None:
        raise RuntimeError("Calibrator was not created: the quantizer cannot observe")

    def range(self) -> tuple[Tensor, Tensor]:
        raise CalibrationError("it has no observer")


def bits_of(spec: QuantSpec) -> Bits:
    """Bits of the integers, or (exponent, mantissa) of fp8."""
    return (int(spec.format.name[1]), int(spec.format.name[3])) if spec.format.floating else spec.bits


def reduce_amax(x: Tensor, axis: Axes = None, keepdims: bool = True) -> Tensor:
    """The largest magnitude over ``axis``, without a gradient; over all axes if None, and then it is 0-dimensional."""
    if not x.numel():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has no largest value")
    magnitude = x.detach().abs()
    if axis is None:
        return magnitude.amax()
    axes = _axes(axis, x)
    return magnitude.amax(dim=axes, keepdim=keepdims) if axes else magnitude


def _axes(axis: Axes, x: Tensor) -> tuple[int, ...]:
    """Axes of ``x``, counted from the front."""
    given = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for a in given:
        if not -x.ndim <= a < x.ndim:
            raise ConfigError(f"axis {a} is out of range for a tensor of shape {tuple(x.shape)}")
    return tuple(a % x.ndim for a in given)
