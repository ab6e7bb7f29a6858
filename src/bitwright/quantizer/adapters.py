"""A calibrator seen as an observer, and quantization by amax seen as a method: what the rest of Bitwright asks for."""

import torch
from torch import Tensor

from bitwright.calib import Calibrator
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods import Method
from bitwright.numerics.amax import fake_quantize_by_amax, integers_by_amax
from bitwright.numerics.fp8 import BY_NAME, fake_fp8_by_amax, to_fp8
from bitwright.numerics.views import broadcast
from bitwright.observers import Observer
from bitwright.spec import QuantSpec


class CalibratorObserver(Observer):
    """Passes tensors on to a calibrator."""

    def __init__(self, spec: QuantSpec, calibrator: Calibrator | None) -> None:
        super().__init__(spec)
        self.calibrator = calibrator
        self.batches = getattr(calibrator, "batches", 0)

    def __call__(self, x: Tensor) -> None:
        """Look at one batch of values."""
        self.observe(x.detach())
        self.batches += 1

    def observe(self, x: Tensor) -> None:
        """Take one tensor into account."""
        if self.calibrator is None:
            raise CalibrationError("the quantizer has no calibrator: it cannot observe")
        self.calibrator.collect(x)

    def range(self) -> tuple[Tensor, Tensor]:
        """What was seen so far, without choosing from it."""
        reach = None if self.calibrator is None else self.calibrator.reach()
        if reach is None:
            raise CalibrationError("no data was seen")
        reach = reach.float().reshape(-1) if self.spec.param_shape((1,) * 9) else reach.float().reshape(())
        return -reach if self.spec.format.signed else torch.zeros_like(reach), reach

    def merge(self, other: Observer) -> None:
        """Calibrators cannot be merged."""
        raise ConfigError(f"a {type(self.calibrator).__name__} cannot be merged: collect all data with one")

    def reset(self) -> None:
        """Forget everything."""
        if self.calibrator is not None:
            self.calibrator.reset()
        self.batches = 0


class AmaxMethod(Method):
    """Rounds with the arithmetic of :mod:`bitwright.numerics.amax`, given the step as ``scale``."""

    def __init__(self, spec: QuantSpec, uniform: bool = True) -> None:
        super().__init__(spec)
        self.uniform = uniform and not spec.format.floating

    def _amax(self, x: Tensor, scale: Tensor) -> Tensor:
        return broadcast(scale, x, self.axis, self.group) * self.spec.qmax

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize."""
        if self.spec.format.floating:
            return fake_fp8_by_amax(x, self._amax(x, scale), BY_NAME[self.spec.format.name])
        return fake_quantize_by_amax(x, self._amax(x, scale), float(self.spec.qmin), float(self.spec.qmax))

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The integers that ``x`` is stored as."""
        return self.integers_by_amax(x, self._amax(x, scale))

    def integers_by_amax(self, x: Tensor, amax: Tensor) -> Tensor:
        """The integers, or fp8 numbers, that ``x`` is stored as, given amax."""
        if self.spec.format.floating:
            return to_fp8(x * (self.spec.qmax / amax), BY_NAME[self.spec.format.name])
        q, _ = integers_by_amax(x, amax, float(self.spec.qmin), float(self.spec.qmax))
        return q.to(torch.int32).to(self.spec.format.storage)
