"""Fake quantization by other packages, as far as they are installed, for comparison."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitwright.spec import QuantSpec

MISSING: list[str] = []
Timed = tuple[Callable[[Tensor], Tensor], list[Tensor]]

try:
    from torchao.quantization.quant_primitives import _fake_quantize_affine
except ImportError:
    MISSING.append("torchao is not installed: pip install torchao")
    _fake_quantize_affine = None
try:
    from brevitas.core.function_wrapper import RoundSte, TensorClamp
    from brevitas.core.quant.int_base import IntQuant
except ImportError:
    MISSING.append("Brevitas is not installed: pip install brevitas")
    IntQuant = RoundSte = TensorClamp = None


def peers(spec: QuantSpec, scale: Tensor, zero: Tensor) -> dict[str, Timed]:
    """Functions to time, each with what it learns, for one scale or one per channel along axis 0."""
    found = of_torch(spec, scale, zero)
    if _fake_quantize_affine is not None:

        def of_torchao(x: Tensor) -> Tensor:
            block = (1, *x.shape[1:]) if scale.ndim else tuple(x.shape)
            return _fake_quantize_affine(x, block, scale, zero, torch.int32, spec.qmin, spec.qmax)

        found["torchao"] = (of_torchao, [])
    if IntQuant is not None:
        signed = spec.format.signed
        rounding = {"float_to_int_impl": RoundSte(), "tensor_clamp_impl": TensorClamp()}
        module = IntQuant(narrow_range=signed, signed=signed, input_view_impl=nn.Identity(), **rounding)
        wide = scale.reshape(-1, 1, 1, 1) if scale.ndim else scale
        learned = wide.clone().requires_grad_()
        numbers = (torch.tensor(0.0), torch.tensor(float(spec.bits)))
        found["Brevitas"] = (lambda x: module(learned, *numbers, x), [learned])
    return found


def of_torch(spec: QuantSpec, scale: Tensor, zero: Tensor) -> dict[str, Timed]:
    """The operators of torch itself: with a fixed scale, and with a learned one."""
    learned, place = scale.reshape(-1).clone().requires_grad_(), zero.reshape(-1).float().requires_grad_()
    ends = (spec.qmin, spec.qmax)
    fixed: Callable[[Tensor], Tensor]
    trained: Callable[[Tensor], Tensor]
    if scale.ndim:
        fixed = lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero, 0, *ends)  # noqa: E731
        trained = lambda x: torch._fake_quantize_learnable_per_channel_affine(x, learned, place, 0, *ends, 1.0)  # noqa: E731
    else:
        fixed = lambda x: torch.fake_quantize_per_tensor_affine(x, float(scale), 0, *ends)  # noqa: E731
        trained = lambda x: torch._fake_quantize_learnable_per_tensor_affine(x, learned, place, *ends, 1.0)  # noqa: E731
    return {"torch.fake_quantize": (fixed, []), "torch learnable (C++)": (trained, [learned, place])}
