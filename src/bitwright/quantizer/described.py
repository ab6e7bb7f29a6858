"""DescribedQuantizer: the TensorQuantizer that a QuantDescriptor describes; its range is an amax."""

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calib import HistogramCalibrator, MaxCalibrator
from bitwright.calib.base import axes_of
from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods import Method
from bitwright.numerics.amax import (
    SMALLEST_AMAX,
    check_unsigned,
    fake_quantize_by_amax,
    limits_of,
    quantize_by_amax,
    reduce_amax,
)
from bitwright.numerics.fp8 import BY_BITS, fake_fp8_by_amax
from bitwright.observers import Observer
from bitwright.quantizer.adapters import AmaxMethod, CalibratorObserver
from bitwright.quantizer.core import TensorQuantizer
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode
from bitwright.quantizer.settings import Described

_log = logging.getLogger(__name__)
_NO_DATA = "Calibrator returned None. This usually happens when calibrator hasn't seen any tensor."


class DescribedQuantizer(Described, TensorQuantizer):
    """Quantizes by the largest magnitude: a stored one, a learned one, or that of each tensor it sees.

    Args:
        quant_desc: what it does; by default 8 bits, one range for the tensor, found anew for each tensor.
        disabled: begin disabled.
        if_quant: quantize.
        if_clip: clip to the learned range.
        if_calib: collect tensors for calibration.

    It begins quantizing. ``TensorQuantizer(QuantDescriptor(...))`` makes one.
    """

    def __init__(
        self,
        quant_desc: QuantDescriptor | None = None,
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self._descriptor = QuantDescriptor() if quant_desc is None else quant_desc
        self.mode, self.enabled = Mode.OFF, True
        self._scale: Tensor | None = None
        self.label, self.observer_name, self.method_name = "", "", "amax"
        desc = self._descriptor
        if desc.amax is not None:
            self.register_buffer("_amax", torch.tensor(desc.amax, dtype=torch.float32))
        if desc.learn_amax:
            self._make_clip(1.0 if desc.amax is None else torch.tensor(desc.amax))
            self.enable_clip()
        if if_clip:
            self.enable_clip()
        kind = HistogramCalibrator if desc.calib_method == "histogram" else MaxCalibrator
        self._calibrator = kind(num_bits=desc.num_bits, axis=desc.axis, unsigned=desc.unsigned)
        self.observer_name = kind.__name__
        for part, on in ((Mode.QUANTIZE, if_quant), (Mode.OBSERVE, if_calib)):
            self._switch(part, on or part in self.mode)
        if disabled:
            self.disable()

    def forward(self, inputs: Tensor) -> Tensor:  # pyrefly: ignore
        """Observe, clip and quantize, as the mode says."""
        if self.pre_quant_scale is not None:
            inputs = inputs * self.pre_quant_scale.to(inputs)
        mode = self.mode
        if not self.enabled or mode is Mode.OFF or not inputs.numel():
            return inputs
        if Mode.OBSERVE in mode:
            if self._calibrator is None:
                raise RuntimeError(f"Calibrator was not created: the quantizer{self._named()} cannot collect.")
            self._calibrator.collect(inputs.detach())
        if Mode.QUANTIZE in mode:
            return self._quantized(inputs)
        return self.clip(inputs) if Mode.CLIP in mode else inputs

    def _quantized(self, inputs: Tensor) -> Tensor:
        if self.learn_amax:
            inputs = self.clip(inputs)
        amax, bits = self._amax_for(inputs), self.num_bits
        if isinstance(bits, tuple):
            return fake_fp8_by_amax(inputs, amax, BY_BITS[bits])
        if self.unsigned:
            check_unsigned(inputs)
        limits = limits_of(bits, self.unsigned, self.narrow_range)
        if self.fake_quant:
            return fake_quantize_by_amax(inputs, amax, *limits)
        outputs, self._scale = quantize_by_amax(inputs, amax, *limits)
        return outputs

    def _amax_for(self, x: Tensor) -> Tensor:
        """The amax for ``x``, in a shape that broadcasts against it."""
        kept = axes_of(self.axis, x.shape)
        if self.learn_amax:
            return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach().reshape(())
        if self.amax is None:
            amax = reduce_amax(x, [d for d in range(x.ndim) if d not in kept] if kept else None)
        else:
            amax = _fit(self.amax.to(x.device), tuple(x.shape), kept, self._named())
        return amax.float() if self.scale_amax is None else amax.float() * self.scale_amax

    def enable_clip(self) -> None:
        """Learn the range, and clip to it."""
        self._clip_switch(True)

    def disable_clip(self) -> None:
        """Do not clip, nor learn the range."""
        self._clip_switch(False)

    def _clip_switch(self, on: bool) -> None:
        if not self.learn_amax:
            raise ConfigError("learn_amax is False. Cannot enable clip." if on else "learn_amax is False: no clip")
        for end in self.clip.parameters():
            end.requires_grad_(on)
        self._switch(Mode.CLIP, on)

    def enable_calib(self) -> None:
        """Collect tensors."""
        if self._calibrator is None:
            raise ConfigError("Calibrator was not created, cannot enable calibration.")
        self._switch(Mode.OBSERVE, True)

    def load_calib_amax(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Take amax from the calibrator.

        Args:
            *args: passed on to the calibrator's ``compute_amax``.
            strict: raise if nothing was collected; otherwise amax becomes NaN.
            **kwargs: passed on as well.
        """
        if self._calibrator is None:
            raise RuntimeError(f"Calibrator not created: the quantizer{self._named()} has none to load from.")
        amax = self._calibrator.compute_amax(*args, **kwargs)
        if amax is None and strict:
            raise RuntimeError(f"{_NO_DATA} Passing 'strict=False' to `load_calib_amax()` will ignore the error.")
        if amax is None:
            _log.warning("%s Set amax to NaN!", _NO_DATA)
            amax = torch.tensor(math.nan)
        self.set_amax(amax)

    def init_learn_amax(self) -> None:
        """Begin learning from the stored amax."""
        if not self.learn_amax:
            raise RuntimeError("Called init_learn_amax with learn_amax=False.")
        if self.amax is None:
            raise RuntimeError("Called init_learn_amax without an amax: calibrate first, or set one.")
        end = self.amax.max()
        self.clip.clip_value_min.data.copy_(-end)
        self.clip.clip_value_max.data.copy_(end)

    # ------------------------------------------------------------ as every TensorQuantizer

    @property
    def calibrated(self) -> bool:
        """Whether a range is stored or learned."""
        return self.amax is not None or self.learn_amax

    @property
    def observer(self) -> Observer:  # pyrefly: ignore
        """The calibrator, as an observer."""
        return CalibratorObserver(self.spec, self._calibrator)

    @property
    def method(self) -> Method:  # pyrefly: ignore
        """The arithmetic, as a method; it has a uniform grid where a file could say all that is done."""
        plain = self.fake_quant and self.pre_quant_scale is None and self.mode is not Mode.CLIP
        if self.learn_amax:
            plain = plain and bool(-self.clip.clip_value_min == self.clip.clip_value_max)
        return AmaxMethod(self.spec, plain)

    @property
    def scale(self) -> Any:  # noqa: ANN401  # pyrefly: ignore
        """The step of each range, empty if there is none; with real integers, what their last tensor is divided by."""
        if not self.fake_quant:
            return self._scale
        return self.qparams()[0] if self.calibrated else torch.empty(0)

    @scale.setter
    def scale(self, value: Tensor) -> None:
        if self.fake_quant and not value.numel():
            self._put("_amax", None)
        elif self.fake_quant and not torch.equal(value, self.scale):
            self.set_qparams(value)

    @property
    def zero_point(self) -> Tensor:  # pyrefly: ignore
        """Zeros."""
        return self.qparams()[1] if self.calibrated else torch.empty(0, dtype=torch.int32)

    @zero_point.setter
    def zero_point(self, value: Tensor) -> None:
        if bool((value != 0).any()):
            raise ConfigError(f"the quantizer{self._named()} is symmetric: its zero point must be 0")

    def quantize(self) -> None:
        """Quantize; without a stored range, by that of each tensor."""
        self.mode = Mode.QUANTIZE

    def compute_qparams(self) -> None:
        """Take the range from the calibrator; one that the descriptor fixes stays."""
        if self._descriptor.amax is not None:
            return
        amax = None if self._calibrator is None else self._calibrator.compute_amax()
        problem = "no data was seen" if amax is None else "NaN or infinity was seen"
        if amax is None or not bool(torch.isfinite(amax).all()):
            raise CalibrationError(f"the quantizer{self._named()} cannot be calibrated: {problem}")
        self.set_amax(amax)
        if self.learn_amax:
            self.init_learn_amax()

    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Set the range by its step (positive, finite); the zero point must be 0."""
        scale = torch.as_tensor(scale, dtype=torch.float32).detach()
        wrong = scale[~((scale > 0) & torch.isfinite(scale))]
        if wrong.numel():
            raise CalibrationError(
                f"the scale of the quantizer{self._named()} must be positive and finite, not {float(wrong[0])}"
            )
        if zero_point is not None:
            self.zero_point = torch.as_tensor(zero_point)
        amax = scale * self.maxbound / (self.scale_amax or 1.0)
        self._fit_scale(scale.shape)
        now = self.amax
        self.set_amax(amax.reshape(now.shape) if now is not None and now.numel() == amax.numel() else amax)
        if self.learn_amax:
            self.init_learn_amax()

    def _fit_scale(self, shape: torch.Size) -> None:
        if shape.numel() != 1 and not self._descriptor.axes:
            raise ConfigError(
                f"a scale of shape {tuple(shape)} does not fit the quantizer{self._named()}: '{self.spec}'"
            )

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The step and a zero point of 0, in the shapes of the spec."""
        if not self.calibrated:
            raise CalibrationError(
                f"the quantizer{self._named()} has no range yet, it takes that of each tensor: "
                "calibrate it, or set amax"
            )
        if self.learn_amax:
            amax = torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach()
        else:
            assert self.amax is not None
            amax = self.amax.float() * (self.scale_amax or 1.0)
        scale = amax.clamp(min=SMALLEST_AMAX) / self.maxbound
        scale = scale.reshape(()) if self.axis is None and scale.numel() == 1 else scale.reshape(-1)
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    def integers(self, x: Tensor) -> Tensor:
        """The integers that ``x`` is stored as."""
        method = AmaxMethod(self.spec)
        return method.integers_by_amax(self.clip(x) if self.learn_amax else x, self._amax_for(x))

    def set_range(self, lo: float | Tensor, hi: float | Tensor) -> None:
        """Set amax so that [lo, hi] is represented."""
        low, high = torch.as_tensor(lo), torch.as_tensor(hi)
        if bool((low > high).any()):
            raise ConfigError(f"the range of the quantizer{self._named()} ends ({hi}) before it begins ({lo})")
        self.set_amax(torch.maximum(-low, high).float())


def _fit(amax: Tensor, shape: tuple[int, ...], kept: tuple[int, ...], named: str) -> Tensor:
    """Shape a stored amax to broadcast against a tensor, or say why it cannot."""
    if amax.numel() == 1:
        return amax.reshape(())
    wanted = tuple(n if d in kept else 1 for d, n in enumerate(shape))
    if amax.numel() == math.prod(wanted) and (amax.ndim == len(kept) or tuple(amax.shape) == wanted):
        return amax.reshape(wanted)
    if not kept and amax.ndim == len(shape) and all(a in (1, n) for a, n in zip(amax.shape, shape, strict=True)):
        return amax
    what = f"one value, or {wanted}" if kept else "one value"
    raise ConfigError(
        f"amax of shape {tuple(amax.shape)} does not fit the quantizer{named} for a tensor of shape {shape}: "
        f"it needs {what}"
    )
