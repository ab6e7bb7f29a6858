"""Optimizer groups: quantizer parameters get their own learning rate, and no weight decay."""

from typing import Any

from torch import nn

from bitwright.errors import ConfigError
from bitwright.methods.base import Method


def parameter_groups(
    model: nn.Module, *, lr: float, quantizer_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Split the Parameters of a model into groups for an optimizer.

    ::

        optimizer = torch.optim.SGD(parameter_groups(model, lr=0.01, weight_decay=1e-4), momentum=0.9)

    Args:
        model: a prepared and calibrated model: quantizers make their Parameters in calibration.
        lr: learning rate of weights, biases and norms.
        quantizer_lr: learning rate of scales, thresholds and the like; ``lr`` if not given.
        weight_decay: for everything but the quantizers' Parameters, which get none: a scale must not decay to zero.

    Returns:
        The group ``"model"`` and, if quantizers learn anything, the group ``"quantizers"``; frozen ones are left out.
    """
    learned = {id(p) for p in nn.ModuleList(m for m in model.modules() if isinstance(m, Method)).parameters()}
    rest, own = [], []
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        (own if id(p) in learned else rest).append(p)
    if not rest and not own:
        raise ConfigError(f"no Parameter of the {type(model).__name__} requires a gradient: there is nothing to train")
    groups: list[dict[str, Any]] = [
        {"name": "model", "params": rest, "lr": lr, "weight_decay": weight_decay},
        {"name": "quantizers", "params": own, "lr": lr if quantizer_lr is None else quantizer_lr, "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]
