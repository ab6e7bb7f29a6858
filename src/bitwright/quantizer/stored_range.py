"""StoredRange: the range of a quantizer, as scale and zero point or as the largest magnitude."""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods import Method
from bitwright.numerics import scale_and_zero_point
from bitwright.numerics.precision import wide
from bitwright.numerics.ranges import symmetric_scale
from bitwright.observers import Observer
from bitwright.observers.base import min_max
from bitwright.spec import PerChannel, PerTensor, QuantSpec


class StoredRange(nn.Module):
    """Stores a range in one of two forms: scale and zero point, or ``_amax`` as given.

    Scales from ``_amax`` are computed on use, so changing it takes effect.

    Attributes:
        label: its name in messages.
        dynamic: without a stored range, use each tensor's own.
        scale_amax: a factor for every amax.
    """

    spec: QuantSpec
    observer: Observer
    method: Method
    dynamic: bool
    label = ""
    scale_amax: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_scale", torch.empty(0), persistent=False)
        self.register_buffer("_zero_point", torch.empty(0, dtype=torch.int32), persistent=False)

    @property
    def calibrated(self) -> bool:
        """Whether a range is stored or learned."""
        return self._buffers.get("_amax") is not None or self._stored()[0].numel() > 0 or self.method.has_range

    @property
    def scale(self) -> Tensor:
        """The step of each range, empty if none is stored; if results are integers, the divisor of the last ones."""
        multiplier = getattr(self.method, "multiplier", None)
        return self._known()[0] if multiplier is None else multiplier

    @property
    def zero_point(self) -> Tensor:
        """The integer that stands for zero, empty if no range is stored."""
        return self._known()[1]

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero point in force: calibrated, or learned since by the method."""
        if not self.calibrated:
            raise self._no_range()
        return self.method.qparams(*self._known())

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value that can be represented."""
        scale, zero_point = (p.detach() for p in self.qparams())
        return (self.spec.qmin - zero_point) * scale, (self.spec.qmax - zero_point) * scale

    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Set the scale (positive, finite) and zero point (within the spec's integers) by hand."""
        device = self._stored()[0].device
        scale = torch.as_tensor(scale, dtype=torch.float32, device=device).detach().clone()
        if zero_point is None:
            zero_point = torch.zeros_like(scale, dtype=torch.int32)
        zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=device).detach().clone()
        self._check_qparams(scale, zero_point)
        shape = self._fit(scale.shape)
        self._store(scale.reshape(shape), zero_point.reshape(shape))
        self.method.start(*self._stored())

    def set_range(self, lo: float | Tensor, hi: float | Tensor) -> None:
        """Set scale and zero point so that [lo, hi] is represented."""
        low, high = torch.as_tensor(lo), torch.as_tensor(hi)
        if bool((low > high).any()):
            raise ConfigError(f"the range of the quantizer{self._named()} ends ({hi}) before it begins ({lo})")
        self.set_qparams(*scale_and_zero_point(low, high, self.spec))

    def set_amax(self, amax: float | Tensor) -> None:
        """Store the largest magnitude to represent, in any shape with one value per range, or one for all."""
        amax = torch.as_tensor(amax, device=self._stored()[0].device).detach()
        amax = wide(amax).clone()
        if not torch.compiler.is_compiling() and bool((amax < 0).any()):
            raise ConfigError(f"Negative values in amax: the lowest is {float(amax.min()):.4g}, it must be 0 or more")
        if not self.spec.symmetric:
            self.set_range(-amax, amax)
            return
        self._store(amax=amax)
        self.method.start(*self._known())

    def forget_range(self) -> None:
        """Forget the range, as before calibration."""
        self._store()

    def change_spec(self, spec: QuantSpec | str) -> None:
        """Switch to another spec, keeping the range."""
        spec = QuantSpec.parse(spec)
        stored = self.range() if self._stored()[0].numel() else None
        self.spec = self.observer.spec = self.method.spec = spec
        if stored is not None:
            self.set_range(*stored)

    def _stored(self) -> tuple[Tensor, Tensor]:
        buffers: Any = self._buffers
        return buffers["_scale"], buffers["_zero_point"]

    def _store(self, scale: Tensor | None = None, zero_point: Tensor | None = None, amax: Tensor | None = None) -> None:
        """Store a range in one of its two forms, and drop the other."""
        known = self._stored()
        for name, value, old in (("_scale", scale, known[0]), ("_zero_point", zero_point, known[1])):
            self._buffers[name] = old.new_empty(0) if value is None else value
        self._put("_amax", amax)

    def _put(self, name: str, value: Tensor | None) -> None:
        """Set a buffer of any shape, or remove it; while amax is unknown, the attribute does not exist."""
        self._buffers.pop(name, None)
        if value is not None:
            self.register_buffer(name, value)

    def _known(self) -> tuple[Tensor, Tensor]:
        """The stored scale and zero point, empty if there are none."""
        amax = self._buffers.get("_amax")
        return self._stored() if amax is None else self._steps(amax)

    def _steps(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        return symmetric_scale(self._reach(amax), self.spec)

    def _reach(self, amax: Tensor) -> Tensor:
        """The magnitudes to represent, one per range, given the largest ones in any shape."""
        grain, reach = self.spec.granularity, wide(amax)
        if isinstance(grain, PerTensor):
            reach = reach.reshape(()) if reach.numel() == 1 else reach  # tensors are compared with it when they arrive
        elif isinstance(grain, PerChannel):
            reach = reach.reshape(-1)
        return reach if self.scale_amax is None else reach * self.scale_amax

    def _reach_of(self, x: Tensor) -> Tensor:
        """The magnitudes to represent in ``x``, one per range: the stored ones, or its own."""
        amax = self._buffers.get("_amax")
        if amax is None:
            if self._stored()[0].numel():
                return self.range()[1]
            lo, hi = self._own_ends(x)
            return self._reach(torch.maximum(-lo, hi) if self.spec.format.signed else hi.clamp(min=0))
        reach, shape = self._reach(amax), self.spec.param_shape(tuple(x.shape))
        if reach.shape == shape:
            return reach
        if reach.numel() == 1:
            return reach.expand(shape)
        raise ConfigError(
            f"amax of shape {tuple(amax.shape)} does not fit the quantizer{self._named()} for a tensor of shape "
            f"{tuple(x.shape)}: it needs one value, or {shape}"
        )

    def _params(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and zero point for ``x``: the stored ones, or those of its own range."""
        stored = self._stored()
        if "_amax" not in self._buffers and (stored[0].numel() or self.method.has_range):
            return stored
        if self.spec.symmetric or "_amax" in self._buffers:
            return symmetric_scale(self._reach_of(x), self.spec)
        lo, hi = self._own_ends(x)
        factor = 1.0 if self.scale_amax is None else self.scale_amax
        return scale_and_zero_point(lo * factor, hi * factor, self.spec)

    def _own_ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of ``x`` for each range."""
        if not self.dynamic:
            raise self._no_range()
        return _ends(x.detach(), self.spec)

    def _check_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        named, spec = self._named(), self.spec
        wrong = scale[~((scale > 0) & torch.isfinite(scale))]
        if wrong.numel():
            raise CalibrationError(
                f"the scale of the quantizer{named} must be positive and finite, not {float(wrong[0])}"
            )
        if scale.shape != zero_point.shape:
            raise ConfigError(
                f"scale {tuple(scale.shape)} and zero point {tuple(zero_point.shape)} "
                f"of the quantizer{named} differ in shape"
            )
        if spec.symmetric and bool((zero_point != 0).any()):
            raise ConfigError(f"the quantizer{named} is symmetric ('{spec}'): its zero point must be 0")
        if bool(((zero_point < spec.qmin) | (zero_point > spec.qmax)).any()):
            raise ConfigError(f"a zero point of the quantizer{named} lies outside [{spec.qmin}, {spec.qmax}]")

    def _fit(self, shape: torch.Size) -> torch.Size:
        """The shape of a scale given as ``shape``, or an error if it does not fit the spec."""
        grain = self.spec.granularity
        if not shape.numel():
            return shape
        if isinstance(grain, PerTensor) and shape.numel() == 1:
            return torch.Size()
        if isinstance(grain, PerTensor) or (isinstance(grain, PerChannel) and len(shape) != 1):
            raise ConfigError(
                f"a scale of shape {tuple(shape)} does not fit the quantizer{self._named()}: '{self.spec}'"
            )
        return shape

    def _no_range(self) -> CalibrationError:
        return CalibrationError(f"the quantizer{self._named()} has no range yet: calibrate it, or set_range(lo, hi)")

    def _named(self) -> str:
        return f" {self.label!r}" if self.label else ""


def _ends(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Lowest and highest value for each scale; unlike in observers, doubles are not rounded to float32."""
    grain = spec.granularity
    if x.dtype != torch.double or not isinstance(grain, PerTensor | PerChannel):
        return min_max(x, spec)
    rows = (
        x.reshape(1, -1) if isinstance(grain, PerTensor) else x.movedim(grain.axis, 0).reshape(x.shape[grain.axis], -1)
    )
    lo, hi = rows.aminmax(dim=1)
    return lo, hi
