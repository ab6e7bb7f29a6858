"""Quantizers that need no calibration, but allow it: the first tensor sets their range."""

from typing import Any

import torch
from torch import Tensor

from bitwright.compat.quantrans.quantops.kinds import Plan
from bitwright.quantizer import TensorQuantizer


def first_batch_quantizer(plan: Plan) -> TensorQuantizer:
    """Create a disabled quantizer with the range of the first tensor or, if it follows, of each in training."""
    options = plan.method_options
    quantizer = TensorQuantizer(plan.spec, plan.observer, plan.method, method_options=options, dynamic=True)
    quantizer.register_forward_pre_hook(_follow if plan.follow else _begin)
    quantizer.disable()
    return quantizer


def switch(quantizer: TensorQuantizer, on: bool, shape: tuple[int, ...] = ()) -> None:
    """From now on quantize tensors of a shape, or pass them through unconditionally.

    The method's Parameters exist immediately, so an optimizer created before the first batch has them.
    """
    quantizer.enabled = on
    if on and not quantizer.calibrated:
        one = torch.ones(quantizer.spec.param_shape(shape), device=quantizer.scale.device)
        quantizer.method.start(one, torch.zeros_like(one, dtype=torch.int32))
    quantizer.quantize()


def _begin(quantizer: Any, args: tuple[Tensor, ...], follow: bool = False) -> None:
    x, known = args[0], quantizer.calibrated and not (follow and quantizer.training)
    if known or not quantizer.quantizes or not x.numel():
        return
    try:
        quantizer.observer(x)
        quantizer.compute_qparams()
    finally:
        quantizer.observer.reset()


def _follow(quantizer: object, args: tuple[Tensor, ...]) -> None:
    _begin(quantizer, args, follow=True)
