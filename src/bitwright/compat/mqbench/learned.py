"""Create quantizer Parameters before calibration, for optimizers created as early as in MQBench."""

import torch
from torch import nn

from bitwright.graph import Inputs
from bitwright.modes import eval_mode, random_numbers_kept
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import TensorQuantizer, quantizers


def start_learning(model: nn.Module, inputs: Inputs) -> None:
    """Create the Parameters of all methods in their final shapes; calibration sets their values in place."""
    shapes: dict[TensorQuantizer, tuple[int, ...]] = {}
    handles = [
        q.register_forward_pre_hook(lambda q, args: shapes.setdefault(q, tuple(args[0].shape)) and None)
        for q in quantizers(model).values()
    ]
    try:
        with torch.no_grad(), random_numbers_kept(), eval_mode(model):
            model(*inputs.args, **inputs.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    shapes.update({site.quantizer: tuple(site.weight().shape) for site in weight_sites(model)})
    for quantizer, shape in shapes.items():
        one = torch.ones(quantizer.spec.param_shape(shape), device=quantizer.scale.device)
        quantizer.method.start(one, torch.zeros_like(one, dtype=torch.int32))
