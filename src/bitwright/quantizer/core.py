"""TensorQuantizer: the only object in the system that quantizes a tensor."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError, suggest
from bitwright.methods import METHODS, Method
from bitwright.methods.learned_step import learned_step
from bitwright.numerics import scale_and_zero_point
from bitwright.observers import OBSERVERS, Observer
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode
from bitwright.spec import PerChannel, PerTensor, QuantSpec


class _Kind(type):
    """Lets ``TensorQuantizer(QuantDescriptor(...))`` give the quantizer that is described."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        first = args[0] if args else kwargs.get("spec")
        if cls is TensorQuantizer and (first is None or isinstance(first, QuantDescriptor)):
            from bitwright.quantizer.described import DescribedQuantizer

            return DescribedQuantizer(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class TensorQuantizer(nn.Module, metaclass=_Kind):
    """A spec, an observer and a method, with a mode and a switch.

    Args:
        spec: what the quantized tensor looks like, or its text.
        observer: name of the observer that finds the range.
        method: name of the method that rounds.
        observer_options: keyword arguments of the observer.
        method_options: keyword arguments of the method.

    Without a spec, or with a :class:`QuantDescriptor` in its place, the result is a :class:`DescribedQuantizer`.

    The scale and zero point are buffers. They are saved with the mode, and load into a fresh quantizer of
    whatever shape; a checkpoint without them (of the float model) loads too and leaves them alone.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        spec: QuantSpec | str,
        observer: str = "MinMaxObserver",
        method: str = "FixedFakeQuantize",
        *,
        observer_options: Mapping[str, Any] | None = None,
        method_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.spec = QuantSpec.parse(spec)
        self.observer: Observer = _build(OBSERVERS.get(observer), "observer", observer, self.spec, observer_options)
        method = _method_for(self.spec, method)
        self.method: Method = _build(METHODS.get(method), "method", method, self.spec, method_options)
        self.observer_name, self.method_name = observer, method
        self.mode = Mode.OFF
        self.enabled = True
        self.label = ""
        self.register_buffer("scale", torch.empty(0))
        self.register_buffer("zero_point", torch.empty(0, dtype=torch.int32))

    @property
    def calibrated(self) -> bool:
        """Whether a scale is known."""
        return self.scale.numel() > 0

    @property
    def quantizes(self) -> bool:
        """Whether it changes tensors now."""
        return self.enabled and Mode.QUANTIZE in self.mode

    @property
    def observes(self) -> bool:
        """Whether it looks at tensors now."""
        return self.enabled and Mode.OBSERVE in self.mode

    def disable(self) -> None:
        """Pass tensors through unchanged, even after calibration; :meth:`enable` restores the mode."""
        self.enabled = False

    def enable(self) -> None:
        """Undo :meth:`disable`."""
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """Observe or quantize ``x`` as the mode says."""
        if not self.enabled:
            return x
        if self.mode is not Mode.QUANTIZE:
            if Mode.OBSERVE in self.mode:
                # Observers count and branch in Python: compiled, they would be compiled anew for every batch.
                observe = torch.compiler.disable(self.observer) if torch.compiler.is_compiling() else self.observer
                observe(x)
            if Mode.QUANTIZE not in self.mode:
                return x
        learned = learned_step(self.method, x)
        return self.method(x, self.scale, self.zero_point) if learned is None else learned

    def off(self) -> None:
        """Pass tensors through unchanged until the mode changes."""
        self.mode = Mode.OFF

    def observe(self) -> None:
        """Look at tensors and let them pass."""
        self.mode = Mode.OBSERVE

    def quantize(self) -> None:
        """Quantize tensors; the range must be known."""
        if not self.calibrated:
            raise CalibrationError(f"the quantizer{self._named()} has no range yet: calibrate it, or set_range(lo, hi)")
        self.mode = Mode.QUANTIZE

    def compute_qparams(self) -> None:
        """Turn what the observer has seen into scale and zero point."""
        try:
            scale, zero_point = self.observer.qparams()
        except CalibrationError as error:
            raise CalibrationError(f"the quantizer{self._named()} cannot be calibrated: {error}") from error
        self.set_qparams(scale, zero_point)

    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Set the scale (positive, finite) and zero point (within the spec's integers) by hand."""
        device = self.scale.device
        scale = torch.as_tensor(scale, dtype=torch.float32, device=device).detach().clone()
        if zero_point is None:
            zero_point = torch.zeros_like(scale, dtype=torch.int32)
        zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=device).detach().clone()
        wrong = scale[~((scale > 0) & torch.isfinite(scale))]
        if wrong.numel():
            raise CalibrationError(
                f"the scale of the quantizer{self._named()} must be positive and finite, not {float(wrong[0])}"
            )
        if scale.shape != zero_point.shape:
            raise ConfigError(
                f"scale {tuple(scale.shape)} and zero point {tuple(zero_point.shape)} "
                f"of the quantizer{self._named()} differ in shape"
            )
        shape = self._fit(scale.shape)
        if self.spec.symmetric and bool((zero_point != 0).any()):
            raise ConfigError(f"the quantizer{self._named()} is symmetric ('{self.spec}'): its zero point must be 0")
        if bool(((zero_point < self.spec.qmin) | (zero_point > self.spec.qmax)).any()):
            raise ConfigError(
                f"a zero point of the quantizer{self._named()} lies outside [{self.spec.qmin}, {self.spec.qmax}]"
            )
        self.scale, self.zero_point = scale.reshape(shape), zero_point.reshape(shape)
        self.method.start(self.scale, self.zero_point)

    def qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero point in force: those calibrated, or what the method has learned since."""
        return self.method.qparams(self.scale, self.zero_point)

    def integers(self, x: Tensor) -> Tensor:
        """The integers that ``x`` is stored as."""
        return self.method.integers(x, self.scale, self.zero_point)

    def set_range(self, lo: float | Tensor, hi: float | Tensor) -> None:
        """Set scale and zero point so that [lo, hi] is represented."""
        low, high = torch.as_tensor(lo), torch.as_tensor(hi)
        if bool((low > high).any()):
            raise ConfigError(f"the range of the quantizer{self._named()} ends ({hi}) before it begins ({lo})")
        self.set_qparams(*scale_and_zero_point(low, high, self.spec))

    def set_amax(self, amax: float | Tensor) -> None:
        """Set scale and zero point so that magnitudes up to ``amax`` are represented."""
        amax = torch.as_tensor(amax).detach().float()
        if isinstance(self.spec.granularity, PerTensor):
            amax = amax.max()
        elif isinstance(self.spec.granularity, PerChannel):
            amax = amax.reshape(-1)
        self.set_range(-amax if self.spec.format.signed else torch.zeros_like(amax), amax)

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value that can be represented."""
        scale, zero_point = (p.detach() for p in self.qparams())
        return (self.spec.qmin - zero_point) * scale, (self.spec.qmax - zero_point) * scale

    def _fit(self, shape: torch.Size) -> torch.Size:
        """The shape that a scale given as ``shape`` has here, or an error if it does not fit the spec."""
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

    def _named(self) -> str:
        return f" {self.label!r}" if self.label else ""

    def extra_repr(self) -> str:
        """Show spec, range and mode."""
        known = "no range"
        if self.calibrated:
            lo, hi = self.range()
            known = f"range [{float(lo.min()):.4g}, {float(hi.max()):.4g}]"
        mode = str(self.mode.name).lower() if self.enabled else "disabled"
        return f"{self.spec}, {known}, {self.observer_name}, {self.method_name}, {mode}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "mode"] = torch.tensor([self.mode.value, self.enabled], dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = [name for name in ("scale", "zero_point") if prefix + name in state_dict]
        try:
            shapes = {name: self._fit(state_dict[prefix + name].shape) for name in given}
        except ConfigError as error:
            error_msgs.append(str(error))
            return
        for name, shape in shapes.items():
            setattr(self, name, getattr(self, name).new_empty(shape))
        mode = state_dict.pop(prefix + "mode", None)
        if mode is not None:
            self.mode, self.enabled = Mode(int(mode[0])), bool(mode[1])
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        if given and self.calibrated:
            self.method.start(self.scale, self.zero_point)  # its Parameters must be there to be loaded next
        # A float checkpoint knows nothing of quantizers; half of one's state is a mistake.
        if len(missing) < 2:
            missing_keys.extend(missing)


def _method_for(spec: QuantSpec, name: str) -> str:
    """The method of that name, or the one for fp8 in place of the default, which rounds to integers."""
    if not spec.format.floating:
        return name
    if METHODS.get(name) not in (METHODS.get("FixedFakeQuantize"), METHODS.get("Fp8FakeQuantize")):
        raise ConfigError(f"the method {name!r} rounds to integers: '{spec}' needs 'Fp8FakeQuantize'")
    return "Fp8FakeQuantize"


def _build(cls: type[Any], kind: str, name: str, spec: QuantSpec, options: Mapping[str, Any] | None) -> Any:  # noqa: ANN401
    if not options:
        return cls(spec)
    known = [p for p in inspect.signature(cls).parameters if p != "spec"]
    for key in options:
        if key not in known:
            raise ConfigError(f"the {kind} {name!r} has no option {key!r}{suggest(key, known)}")
    return cls(spec, **options)


def quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Every quantizer of a model by its qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, TensorQuantizer)}
