"""What a described quantizer is: its descriptor, its range, and how both are printed and saved."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calib import Calibrator
from bitwright.numerics.amax import bound_of, check_amax
from bitwright.numerics.fp8 import BY_BITS
from bitwright.quantizer.clip import Clip
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.saving import load_described, save_described
from bitwright.quantizer.switches import Switches
from bitwright.spec import QuantSpec

_log = logging.getLogger(__name__)


class Described(Switches):
    """Settings as views of one descriptor, a range as the buffer ``_amax``, and a mode.

    ``_amax`` is there only once it is known, and so are ``_pre_quant_scale`` and the submodule ``clip``.
    """

    _descriptor: QuantDescriptor
    _calibrator: Calibrator | None
    clip: Clip
    label: str

    @property
    def descriptor(self) -> QuantDescriptor:
        """What it does, with all changes since it was made."""
        return self._descriptor

    @property
    def spec(self) -> QuantSpec:  # pyrefly: ignore
        """The same as a spec."""
        return self._descriptor.spec

    @property
    def num_bits(self) -> int | tuple[int, int]:
        """Bits of the integers, or (exponent, mantissa) of fp8."""
        return self._descriptor.num_bits

    @num_bits.setter
    def num_bits(self, value: int | tuple[int, int]) -> None:
        self._change(num_bits=value)

    @property
    def unsigned(self) -> bool:
        """Whether integers start from 0."""
        return self._descriptor.unsigned

    @unsigned.setter
    def unsigned(self, value: bool) -> None:
        self._change(unsigned=value)

    @property
    def narrow_range(self) -> bool:
        """Whether the lowest integer is left out."""
        return self._descriptor.narrow_range

    @narrow_range.setter
    def narrow_range(self, value: bool) -> None:
        self._change(narrow_range=value)

    @property
    def axis(self) -> int | tuple[int, ...] | None:
        """The axes that keep a range of their own."""
        return self._descriptor.axis

    @property
    def fake_quant(self) -> bool:
        """Whether floats come out, not integers."""
        return self._descriptor.fake_quant

    @property
    def learn_amax(self) -> bool:
        """Whether the range is learned."""
        return self._descriptor.learn_amax

    @property
    def scale_amax(self) -> float | None:
        """The factor of every amax."""
        return self._descriptor.scale_amax

    _num_bits, _unsigned, _narrow_range, _axis = num_bits, unsigned, narrow_range, axis
    _fake_quant, _learn_amax, _scale_amax = fake_quant, learn_amax, scale_amax

    @property
    def maxbound(self) -> float:
        """The highest integer, or number of fp8."""
        bits = self.num_bits
        return bound_of(bits, self.unsigned) if isinstance(bits, int) else BY_BITS[bits].top

    @property
    def amax(self) -> Tensor | None:
        """The stored amax, or None."""
        return self._buffers.get("_amax")

    @amax.setter
    def amax(self, value: Any) -> None:  # noqa: ANN401
        if value is None:
            _log.error("Setting amax to None is meaningless; the quantizer%s keeps its range", self._named())
            return
        new, now = _as_amax(value), self.amax
        if now is not None and now.shape != new.shape:
            raise TypeError(
                "Changing shape when setting amax is not allowed: "
                f"the quantizer{self._named()} has {tuple(now.shape)}, not {tuple(new.shape)}"
            )
        self.set_amax(new)

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """What tensors are multiplied with before anything else (SmoothQuant), also while the quantizer is off."""
        return self._buffers.get("_pre_quant_scale")

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: Any) -> None:  # noqa: ANN401
        self._put("_pre_quant_scale", None if value is None else torch.as_tensor(value).detach().float().clone())

    @property
    def step_size(self) -> Tensor | None:
        """The distance between neighbouring values (for fp8, of the scaled numbers), or None if it is not known."""
        if self.amax is None:
            _log.error("step_size is undefined under dynamic amax mode!")
            return None
        return self.amax / self.maxbound

    def set_amax(self, amax: Tensor | float) -> None:
        """Set amax, in whatever shape."""
        new = _as_amax(amax)
        self._put("_amax", new if self.amax is None else new.to(self.amax.device))

    def _get_name(self) -> str:
        return "TensorQuantizer"

    def _short_amax(self, fmt: str = ".4f") -> str:
        """The stored amax in a few characters."""
        amax = self.amax
        if amax is None:
            return "dynamic"
        if amax.numel() == 1:
            return f"{amax.item():{fmt}}"
        return f"[{amax.min().item():{fmt}}, {amax.max().item():{fmt}}]({amax.numel()})"

    def extra_repr(self) -> str:
        """Show everything that matters in one line."""
        if self._disabled:
            return "disabled"
        bits = self.num_bits
        words = ["unsigned"] * self.unsigned + [f"{bits}bit" if isinstance(bits, int) else f"fp8 e{bits[0]}m{bits[1]}"]
        words += ["narrow"] * self.narrow_range + ["fake" if self.fake_quant else "real"]
        words += ["per-tensor" if self.axis is None else f"axis={self.axis}", f"amax={self._short_amax()}"]
        words += [f"*{self.scale_amax}"] * (self.scale_amax is not None) + ["learned"] * self.learn_amax
        words += ["pre_quant_scale"] * (self.pre_quant_scale is not None)
        words += [f"calibrator={type(self._calibrator).__name__}"] * (self._calibrator is not None)
        words += ["quant"] * self._if_quant + ["clip"] * self._if_clip + ["calib"] * self._if_calib
        return " ".join(words)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        save_described(self._descriptor, self.mode, self.enabled, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        missing: list[str] = args[2]  # what is not there stays as it is: a float checkpoint knows no quantizer
        before = list(missing)
        found = load_described(self._descriptor, state_dict, prefix)
        for name in ("_amax", "_pre_quant_scale"):
            value = state_dict.get(prefix + name)
            if value is not None:
                known = self._buffers.get(name)
                self._put(name, torch.empty_like(value, device=known.device if known is not None else value.device))
            elif found is not None:
                self._put(name, None)
        if found is not None:
            self._descriptor, self.mode, self.enabled = found
            self._tell_calibrator()
            if not self.learn_amax:
                self._modules.pop("clip", None)
        if prefix + "clip.clip_value_min" in state_dict and not hasattr(self, "clip"):
            self._descriptor = self._descriptor.with_(learn_amax=True)
            self._make_clip(1.0)
        if hasattr(self, "clip"):
            self.clip.requires_grad_(self._if_clip)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)
        missing[:] = before

    def _make_clip(self, end: float | Tensor) -> None:
        self.clip = Clip(-end, end, learn_min=True, learn_max=True)

    def _change(self, **changes: Any) -> None:
        self._descriptor = self._descriptor.with_(**changes)
        self._tell_calibrator()

    def _tell_calibrator(self) -> None:
        if self._calibrator is not None:
            self._calibrator._num_bits, self._calibrator._unsigned = self.num_bits, self.unsigned

    def _put(self, name: str, value: Tensor | None) -> None:
        """Set a buffer of whatever shape, or take it away: an unknown amax is no attribute."""
        self._buffers.pop(name, None)
        self._non_persistent_buffers_set.discard(name)
        if value is not None:
            self.register_buffer(name, value)

    def _named(self) -> str:
        return f" {self.label!r}" if self.label else ""


def _as_amax(value: Any) -> Tensor:  # noqa: ANN401
    amax = torch.as_tensor(value).detach().float().clone()
    check_amax(amax)
    return amax
