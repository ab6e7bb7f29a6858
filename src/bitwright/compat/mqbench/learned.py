"""Let what quantizers learn be there before calibration, for an optimizer that is made as early as in MQBench."""

from typing import Any

import torch
from torch import nn

from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.mixins import QuantMixin
from bitwright.quantizer import TensorQuantizer, quantizers


def start_learning(model: nn.Module, inputs: Inputs) -> None:
    """Make the Parameters of all methods, in the shapes that they will have; calibration sets their values in place."""
    shapes: dict[TensorQuantizer, tuple[int, ...]] = {}
    handles = [
        q.register_forward_pre_hook(lambda q, args: shapes.setdefault(q, tuple(args[0].shape)) and None)
        for q in quantizers(model).values()
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), eval_mode(model):
            model(*inputs.args, **inputs.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for layer in model.modules():
        if isinstance(layer, QuantMixin) and hasattr(layer, "_weight_quantizer") and hasattr(layer, "weight"):
            shapes[layer.weight_quantizer] = tuple(layer.weight.shape)
    for quantizer, shape in shapes.items():
        one = torch.ones(quantizer.spec.param_shape(shape), device=quantizer.scale.device)
        quantizer.method.start(one, torch.zeros_like(one, dtype=torch.int32))
        quantizer.register_load_state_dict_pre_hook(_fill_in)


def _fill_in(quantizer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A float checkpoint knows nothing of what is learned: it stays as it is."""
    if prefix + "scale" not in state:
        state.update({f"{prefix}method.{name}": p.detach() for name, p in quantizer.method.named_parameters()})
