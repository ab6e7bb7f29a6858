"""TensorQuantizer: the only object in the system that quantizes a tensor."""

from collections.abc import Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods import Method
from bitwright.methods.amax import AmaxFakeQuantize
from bitwright.methods.learned_step import learned_step
from bitwright.observers import Observer
from bitwright.quantizer.amax_views import AmaxViews
from bitwright.quantizer.build import build_method, build_observer
from bitwright.quantizer.calibrators import Calibrator, HistogramCalibrator, MaxCalibrator, NoObserver
from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode
from bitwright.quantizer.state import load_state, save_state
from bitwright.spec import QuantSpec


class TensorQuantizer(AmaxViews):
    """A spec, an observer and a method, with a mode and a switch.

    Args:
        spec: what the quantized tensor looks like, or its text.
        observer: name of the observer that finds the range.
        method: name of the method that rounds.
        observer_options: keyword arguments of the observer.
        method_options: keyword arguments of the method.
        dynamic: without a stored range, quantize each tensor with its own.

    Or, made from a :class:`QuantDescriptor` as in pytorch-quantization, dynamic and quantizing from the start:

        quant_desc: all of the above in one value; by default 8 bits and one range for the tensor.
        disabled: begin disabled.
        if_quant: quantize.
        if_clip: clip to the learned range.
        if_calib: observe.

    The range is stored as scale and zero point, or as the largest magnitude ``_amax`` where that is what was given. A
    checkpoint holds it with the spec and the mode, and loads into a fresh quantizer of the same spec, whatever the
    number of channels. A checkpoint of the float model leaves quantizers alone.

    Attributes:
        mode: what it does with tensors while it is enabled.
        enabled: the user's switch; calibration leaves a disabled quantizer alone.
        fixed: keep the range that the descriptor gives when the model is calibrated.
        axes: several axes that keep ranges of their own, if so; they are one axis for the observer and the method.
    """

    mode = Mode.OFF
    enabled = True
    fixed = False
    axes: tuple[int, ...] = ()
    calibrators: ClassVar[Mapping[str, Any]] = {"histogram": HistogramCalibrator, "max": MaxCalibrator}

    @overload
    def __init__(
        self,
        spec: QuantSpec | str,
        observer: str = "MinMaxObserver",
        method: str = "FixedFakeQuantize",
        *,
        observer_options: Mapping[str, Any] | None = None,
        method_options: Mapping[str, Any] | None = None,
        dynamic: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        quant_desc: QuantDescriptor | None = None,
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        first = args[0] if args else kwargs.get("spec")
        described = first is None or isinstance(first, QuantDescriptor)
        (self._init_described if described else self._init_specified)(*args, **kwargs)

    def _init_specified(
        self,
        spec: QuantSpec | str,
        observer: str = "MinMaxObserver",
        method: str = "FixedFakeQuantize",
        *,
        observer_options: Mapping[str, Any] | None = None,
        method_options: Mapping[str, Any] | None = None,
        dynamic: bool = False,
    ) -> None:
        self.spec, self.dynamic = QuantSpec.parse(spec), dynamic
        self.observer: Observer = build_observer(self.spec, observer, observer_options)
        self.method: Method = build_method(self.spec, method, method_options)
        self.observer_name, self.method_name = observer, method

    def _init_described(
        self,
        quant_desc: QuantDescriptor | None = None,
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        desc = quant_desc or QuantDescriptor()
        if len(desc.axes) > 1:
            self.axes, desc = desc.axes, desc.with_(axis=0)
        self.spec, self.dynamic = desc.spec, True
        kind = self.calibrators[desc.calib_method]
        self.observer = kind(desc.num_bits, desc.axis, desc.unsigned)
        self.method = AmaxFakeQuantize(self.spec, learn=desc.learn_amax, real=not desc.fake_quant)
        self.observer_name, self.method_name = kind.__name__, "AmaxFakeQuantize"
        self.fixed, self.scale_amax, self.label = desc.amax is not None, desc.scale_amax, desc.name or ""
        self.mode = Mode.OBSERVE if if_calib else Mode.OFF
        self.enabled = not disabled
        if desc.amax is not None:
            self.set_amax(torch.tensor(desc.amax))
        if desc.learn_amax or if_clip:
            self.enable_clip()
        if if_quant:
            self.enable_quant()

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

    def off(self) -> None:
        """Pass tensors through unchanged until the mode changes."""
        self.mode = Mode.OFF

    def observe(self) -> None:
        """Look at tensors and pass them through unchanged."""
        self.mode = Mode.OBSERVE

    def quantize(self) -> None:
        """Quantize tensors; the range must be known, or dynamic."""
        if not (self.dynamic or self.calibrated):
            raise self._no_range()
        self.mode = Mode.QUANTIZE

    def forward(self, x: Tensor) -> Tensor:
        """Observe or quantize ``x`` as the mode says."""
        if not self.enabled or self.mode is Mode.OFF:
            return x
        if self.axes:
            front = tuple(range(len(self.axes)))
            moved = x.movedim(self.axes, front)
            result = self._pass(moved.flatten(0, front[-1]))
            return result.unflatten(0, moved.shape[: len(front)]).movedim(front, self.axes)
        return self._pass(x)

    def _pass(self, x: Tensor) -> Tensor:
        if self.mode is not Mode.QUANTIZE:
            if Mode.OBSERVE in self.mode:
                self._check_memory(x)
                # Observers count and branch in Python: torch would compile them again for every batch.
                observe = torch.compiler.disable(self.observer) if torch.compiler.is_compiling() else self.observer
                observe(x)
            if Mode.QUANTIZE not in self.mode:
                return x
        return self.fake_quantize(x)

    def _check_memory(self, x: Tensor) -> None:
        """Refuse a tensor that has no memory: what an observer keeps of it would be gone once vmap is left."""
        try:
            x.untyped_storage()
        except NotImplementedError as error:
            raise CalibrationError(
                f"the quantizer{self._named()} is called inside torch.vmap, or on a sparse tensor, of which it sees no "
                "values: call the layer outside of vmap, or leave it float (skip=… with its name)"
            ) from error

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize ``x``, whatever the mode."""
        learned = learned_step(self.method, x)
        if learned is not None:
            return learned
        if self.dynamic and not x.numel():
            return x
        result = self.method(x, *self._params(x))
        if not isinstance(result, Tensor):
            raise ConfigError(f"{type(self.method).__name__}.forward must return a tensor, not {result!r}")
        return result

    def integers(self, x: Tensor) -> Tensor:
        """The integers that ``x`` is stored as."""
        return self.method.integers(x, *self._params(x))

    def values(self, integers: Tensor) -> Tensor:
        """What integers stand for."""
        return self.method.values(integers, *self._known())

    @property
    def uniform(self) -> bool:
        """Whether it rounds to one uniform grid, and does nothing else."""
        return self.method.uniform and not self.axes and self.pre_quant_scale is None

    @property
    def calibratable(self) -> bool:
        """Whether calibration finds the range; not if it is fixed, or if there is no observer."""
        return not (self.fixed or isinstance(self.observer, NoObserver))

    def compute_qparams(self) -> None:
        """Turn what the observer has seen into a range, if that is how the range is found."""
        if not self.calibratable:
            return
        try:
            if isinstance(self.observer, Calibrator):
                self.set_amax(self.observer.amax())
            else:
                self.set_qparams(*self.observer.qparams())
        except CalibrationError as error:
            raise CalibrationError(f"the quantizer{self._named()} cannot be calibrated: {error}") from error

    def extra_repr(self) -> str:
        known = "dynamic range" if self.dynamic else "no range"
        if self.calibrated:
            lo, hi = self.range()
            known = f"range [{float(lo.min()):.4g}, {float(hi.max()):.4g}]"
        mode = "|".join(str(m.name).lower() for m in self.mode) or "off"
        return f"{self.spec}, {known}, {self.observer_name}, {self.method_name}, {mode if self.enabled else 'disabled'}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_state(self, destination, prefix)

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
        if load_state(self, state_dict, prefix, local_metadata, missing_keys, error_msgs):
            rest = (local_metadata, strict, [], unexpected_keys, error_msgs)  # what is missing stays as it is
            super()._load_from_state_dict(state_dict, prefix, *rest)


def quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Every quantizer of a model by its qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, TensorQuantizer)}
