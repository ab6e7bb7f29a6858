"""MaxCalibrator: the largest magnitude seen."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitwright.calib.base import Calibrator, axes_of
from bitwright.numerics.amax import reduce_amax


class MaxCalibrator(Calibrator):
    """Keeps the largest magnitude, for the tensor or along axes.

    Args:
        num_bits: as in :class:`Calibrator`; it makes no difference here.
        axis: as in :class:`Calibrator`.
        unsigned: as in :class:`Calibrator`; it makes no difference here.
        track_amax: remember the amax of every tensor in ``amaxs``.
    """

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | Sequence[int] | None = None,
        unsigned: bool = False,
        track_amax: bool = False,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._calib_amax: Tensor | None = None
        self._amaxs: list[Tensor] = []

    @property
    def amaxs(self) -> list[Tensor]:
        """The amax of every tensor so far, if they are tracked."""
        return self._amaxs

    def collect(self, x: Tensor) -> None:
        """Take one tensor into account."""
        kept = axes_of(self._axis, x.shape)
        if not x.numel():
            return
        local = reduce_amax(x, [d for d in range(x.ndim) if d not in kept] if kept else None)
        if self._calib_amax is not None and local.shape != self._calib_amax.shape:
            raise RuntimeError(
                f"amax shape changed! It was {tuple(self._calib_amax.shape)} before and is {tuple(local.shape)} "
                f"for a tensor of shape {tuple(x.shape)}"
            )
        self._calib_amax = local if self._calib_amax is None else torch.maximum(self._calib_amax, local)
        if self._track_amax:
            self._amaxs.append(local.cpu())
        self.batches += 1

    def reset(self) -> None:
        """Forget everything."""
        self._calib_amax, self._amaxs, self.batches = None, [], 0

    def compute_amax(self) -> Tensor | None:
        """The largest magnitude seen, or None."""
        return self._calib_amax
