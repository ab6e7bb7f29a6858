"""Random weights that compute like trained ones: nothing is constant, and BatchNorm knows its inputs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.zoo.families import Batch

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


def make_sane(model: nn.Module, batch: Batch) -> None:
    """Give a fresh model weights as after training, in place.

    A fresh model has parameters of one value: scales of 1 or 1e-6, biases and position tables of 0. Whatever drops,
    doubles or misplaces one of them would go unseen. Layers with tiny weights get larger ones, and BatchNorm the
    statistics of what really flows through it.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            _spread(parameter)
        layers = [m for m in model.modules() if isinstance(m, _LAYERS)]
        handles = [layer.register_forward_hook(_keep_power) for layer in layers]
        try:
            with _batchnorm_learning(model):
                call(model, batch)
        finally:
            for handle in handles:
                handle.remove()


def _keep_power(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
    """Scale up the weight of a layer whose results differ from sample to sample much less than its inputs do."""
    gain = float(output.std(0).mean() / args[0].std(0).mean())
    if not 0.0 < gain < 0.1:
        return None
    layer.get_parameter("weight").div_(gain)
    return type(layer).forward(layer, *args)


def call(model: nn.Module, batch: Batch) -> object:
    """Call a model with a batch as its forward takes it."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def _spread(parameter: nn.Parameter) -> None:
    if not parameter.is_floating_point() or bool((parameter != parameter.flatten()[0]).any()):
        return
    value = float(parameter.flatten()[0])
    if parameter.numel() == 1:
        parameter.add_(0.3)
    elif abs(value) < 0.05:  # a bias, a table of positions, the scale of a fresh residual branch
        parameter.normal_(0.2 if value else 0.0, 0.05)
    else:
        parameter.mul_(torch.empty_like(parameter).uniform_(0.6, 1.4))


@contextmanager
def _batchnorm_learning(model: nn.Module) -> Iterator[None]:
    """Let every BatchNorm, and nothing else, take its statistics from the next batches."""
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [n.momentum for n in norms]
    for norm in norms:
        norm.momentum = 1.0  # only what this batch says
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
        model.eval()
