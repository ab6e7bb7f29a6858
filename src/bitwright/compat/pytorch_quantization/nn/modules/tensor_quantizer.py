"""The quantizer of a tensor, with the old values to the last bit."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitwright.compat.pytorch_quantization import tensor_quant
from bitwright.compat.pytorch_quantization.calib.histogram import HistogramCalibrator
from bitwright.compat.pytorch_quantization.onnx_export import enable_onnx_export
from bitwright.methods.amax import AmaxFakeQuantize
from bitwright.numerics.precision import wide
from bitwright.numerics.views import broadcast
from bitwright.quantizer import TensorQuantizer as _TensorQuantizer
from bitwright.quantizer.calibrators import MaxCalibrator


class _Exporting(type):
    """What scripts for earlier versions set on the class before they export."""

    _switch: ClassVar[ExitStack] = ExitStack()
    _on: ClassVar[bool] = False

    @property
    def use_fb_fake_quant(cls) -> bool:
        """Whether ``torch.onnx.export`` knows quantizers: True until it is False, as inside ``enable_onnx_export``."""
        return _Exporting._on

    @use_fb_fake_quant.setter
    def use_fb_fake_quant(cls, on: bool) -> None:
        _Exporting._switch.close()
        _Exporting._on = bool(on)
        if on:
            _Exporting._switch.enter_context(enable_onnx_export())


class TensorQuantizer(_TensorQuantizer, metaclass=_Exporting):
    """A quantizer that computes as the functions of ``tensor_quant`` do.

    A file has QuantizeLinear, which divides by the step amax / bound: the last bit of its values can differ, and a
    value half way between two steps can go the other way. Weights are stored as the integers that were trained with.
    """

    calibrators: ClassVar[Mapping[str, Any]] = {"histogram": HistogramCalibrator, "max": MaxCalibrator}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, Any], None, None]:
        """Itself, and what learns inside: scripts take every module with "quantizer" in its name for a quantizer."""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if module is not self.method or next(module.parameters(), None) is not None:
                yield name, module

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize ``x``, whatever the mode."""
        method = self.method
        if not isinstance(method, AmaxFakeQuantize) or not x.numel():
            return super().fake_quantize(x)
        x = method.clipped(x)
        if not method.rounds:
            return x
        amax = self._broadcast_amax(x)
        if isinstance(self.num_bits, tuple):
            return tensor_quant.FP8[self.num_bits](x, amax)
        if not method.real:
            return tensor_quant.fake_tensor_quant(x, amax, self.num_bits, self.unsigned, self.narrow_range)
        # The old quantizer leaves the lowest integer out here, whatever narrow_range says.
        y, method.multiplier = tensor_quant.tensor_quant(x, amax, self.num_bits, self.unsigned)
        return y

    def integers(self, x: Tensor) -> Tensor:
        """The integers that ``x`` is stored as."""
        if not isinstance(self.method, AmaxFakeQuantize) or isinstance(self.num_bits, tuple):
            return super().integers(x)
        x = self.method.clipped(x)
        q, _ = tensor_quant.tensor_quant(
            wide(x.detach()), self._broadcast_amax(x), self.num_bits, self.unsigned, self.narrow_range
        )
        return q.to(self.spec.format.storage)

    def _broadcast_amax(self, x: Tensor) -> Tensor:
        """The largest magnitude in force, shaped to broadcast against ``x``."""
        method = self.method
        if self.learn_amax:
            return torch.maximum(-method.clip_value_min, method.clip_value_max).detach()  # pyrefly: ignore
        return broadcast(self._reach_of(x), x, method.axis, None)


__all__ = ["TensorQuantizer", "enable_onnx_export"]
