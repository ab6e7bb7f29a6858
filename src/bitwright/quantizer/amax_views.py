"""AmaxViews: the names of NVIDIA's pytorch-quantization on every quantizer. They override nothing.

Each is a view of the quantizer's spec, range, observer, method, mode or switch.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.observers import Observer
from bitwright.quantizer.calibrators import Calibrator, NoObserver, bits_of, reduce_amax
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode
from bitwright.quantizer.stored_range import StoredRange
from bitwright.spec import PerTensor, QuantSpec
from bitwright.torch_internals import remove_pre_hook

_log = logging.getLogger(__name__)
_NO_DATA = "Calibrator returned None. This usually happens when calibrator hasn't seen any tensor."


def _spec_view(field: str, read: Callable[[QuantSpec], Any], doc: str) -> property:
    """A field of the descriptor, read off the spec; setting it changes the spec."""
    return property(lambda self: read(self.spec), lambda self, value: self._describe(**{field: value}), doc=doc)


class AmaxViews(StoredRange):
    """Mixed into TensorQuantizer."""

    mode: Mode
    enabled: bool
    axes: tuple[int, ...]

    num_bits = _spec_view("num_bits", bits_of, "Bits of the integers, or (exponent, mantissa) of fp8.")
    unsigned = _spec_view("unsigned", lambda spec: not spec.format.signed, "Whether integers start from 0.")
    narrow_range = _spec_view("narrow_range", lambda spec: spec.narrow, "Whether the lowest integer is left out.")

    @property
    def axis(self) -> int | tuple[int, ...] | None:
        """The axes that keep a range of their own."""
        grain = self.spec.granularity
        return self.axes or (None if isinstance(grain, PerTensor) else grain.axis)

    @property
    def maxbound(self) -> float:
        """The highest integer, or number of fp8."""
        return float(self.spec.qmax)

    def set_bit(self, bit: int) -> None:
        """Quantize in that many bits from now on, as Sparsebit says it."""
        self.num_bits = bit

    def _describe(self, **changes: object) -> None:
        now = QuantDescriptor(self.num_bits, unsigned=self.unsigned, narrow_range=self.narrow_range)
        spec = now.with_(**changes).spec
        self.change_spec(self.spec.with_(format=spec.format, narrow=spec.narrow))

    @property
    def fake_quant(self) -> bool:
        """Whether floats come out, not integers."""
        return not getattr(self.method, "real", False)

    @property
    def learn_amax(self) -> bool:
        """Whether the range is learned."""
        return self.method.has_range

    @property
    def clip(self) -> Any:  # noqa: ANN401
        """What has the learned ends, ``clip_value_min`` and ``clip_value_max``."""
        return self.method

    def init_learn_amax(self) -> None:
        """Begin learning from the stored amax."""
        if not self.learn_amax:
            raise RuntimeError("Called init_learn_amax with learn_amax=False.")
        if self.amax is None:
            raise RuntimeError("Called init_learn_amax without an amax: calibrate first, or set one.")
        self.clip.begin(self.amax.max())

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude, as it was stored, or None."""
        known = self._buffers.get("_amax")
        if known is not None or self.learn_amax or not self.calibrated:
            return known
        lo, hi = self.range()
        return hi if self.spec.symmetric else torch.maximum(-lo, hi)

    @amax.setter
    def amax(self, value: object) -> None:
        if value is None:
            _log.error("Setting amax to None is meaningless; the quantizer keeps its range")
            return
        new, now = torch.as_tensor(value), self.amax
        if now is not None and now.shape != new.shape:
            raise TypeError(
                "Changing shape when setting amax is not allowed: "
                f"the quantizer has {tuple(now.shape)}, not {tuple(new.shape)}"
            )
        self.set_amax(new)

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """The largest magnitude in force for ``inputs``: the stored one or their own, times ``scale_amax``."""
        axes = tuple(a % inputs.ndim for a in ((self.axis,) if isinstance(self.axis, int) else self.axis or ()))
        reduced = [d for d in range(inputs.ndim) if d not in axes] if axes else None
        amax = reduce_amax(inputs, reduced) if self.amax is None else self.amax
        return amax if self.scale_amax is None else amax * self.scale_amax

    @property
    def step_size(self) -> Tensor | None:
        """The distance between neighbouring values (for fp8, of the scaled numbers), or None if it is not known."""
        if self.amax is None:
            _log.error("step_size is undefined under dynamic amax mode!")
            return None
        return self.amax / self.maxbound

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """What tensors are multiplied with before anything else (SmoothQuant), even while the quantizer is disabled."""
        return self._buffers.get("_pre_quant_scale")

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: object) -> None:
        remove_pre_hook(self, _multiply)
        self._put("_pre_quant_scale", None if value is None else torch.as_tensor(value).detach().float().clone())
        if value is not None:
            self.register_forward_pre_hook(_multiply)

    @property
    def _calibrator(self) -> Observer | None:
        return None if isinstance(self.observer, NoObserver) else self.observer

    @_calibrator.setter
    def _calibrator(self, value: Calibrator | None) -> None:
        self.observer = NoObserver(self.spec) if value is None else value

    def load_calib_amax(self, *args: object, strict: bool = True, **kwargs: object) -> None:
        """Take amax from the calibrator.

        Args:
            *args: passed on to the calibrator's ``compute_amax``.
            strict: raise if nothing was collected; otherwise amax becomes NaN.
            **kwargs: passed on as well.
        """
        if not isinstance(self.observer, Calibrator):
            raise RuntimeError("Calibrator not created: the quantizer has none to load from.")
        amax = self.observer.compute_amax(*args, **kwargs)
        if amax is None and strict:
            raise RuntimeError(f"{_NO_DATA} Passing 'strict=False' to `load_calib_amax()` will ignore the error.")
        if amax is None:
            _log.warning("%s Set amax to NaN!", _NO_DATA)
            amax = torch.tensor(math.nan)
        self.set_amax(amax)

    def enable_calib(self) -> None:
        """Observe."""
        if self._calibrator is None:
            raise ConfigError("Calibrator was not created, cannot enable calibration.")
        self.mode |= Mode.OBSERVE

    def disable_calib(self) -> None:
        """Do not observe."""
        self.mode &= ~Mode.OBSERVE

    def enable_quant(self) -> None:
        """Quantize."""
        self.mode |= Mode.QUANTIZE
        self._round(True)

    def disable_quant(self) -> None:
        """Do not quantize; a learned range goes on clipping."""
        self._round(False)
        if not self._if_clip:
            self.mode &= ~Mode.QUANTIZE

    def enable_clip(self) -> None:
        """Learn the range, and clip to it."""
        self._learn(True)
        if Mode.QUANTIZE not in self.mode:
            self._round(False)
            self.mode |= Mode.QUANTIZE

    def disable_clip(self) -> None:
        """Do not learn the range, nor clip without quantizing."""
        quantizing = self._if_quant
        self._learn(False)
        if not quantizing:
            self.mode &= ~Mode.QUANTIZE

    def _learn(self, on: bool) -> None:
        if not self.learn_amax:
            raise ConfigError("learn_amax is False. Cannot enable clip." if on else "learn_amax is False: no clip")
        self.clip.clips = on
        self.clip.requires_grad_(on)

    def _round(self, on: bool) -> None:
        if self.learn_amax:
            self.clip.rounds = on

    _disabled = property(lambda self: not self.enabled)
    _if_quant = property(lambda self: Mode.QUANTIZE in self.mode and getattr(self.method, "rounds", True))
    _if_calib = property(lambda self: Mode.OBSERVE in self.mode)
    _if_clip = property(lambda self: getattr(self.method, "clips", False))
    _scale_amax = property(lambda self: self.scale_amax)
    _num_bits, _unsigned, _narrow_range, _axis = num_bits, unsigned, narrow_range, axis
    _fake_quant, _learn_amax = fake_quant, learn_amax


def _multiply(quantizer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    scale: Any = quantizer._buffers["_pre_quant_scale"]
    return args[0] * scale.to(args[0]), *args[1:]
