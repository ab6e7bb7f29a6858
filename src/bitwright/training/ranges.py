"""Freeze what quantizers learn, so that weights settle on their grid."""

from torch import nn

from bitwright.methods import Method


def freeze_ranges(model: nn.Module) -> nn.Module:
    """Freeze scales, thresholds and everything else that quantizers learn.

    Returns:
        The same model. The optimizer can stay: it skips Parameters without a gradient.
    """
    return _ask(model, False)


def unfreeze_ranges(model: nn.Module) -> nn.Module:
    """Undo :func:`freeze_ranges`."""
    return _ask(model, True)


def _ask(model: nn.Module, gradients: bool) -> nn.Module:
    for method in (m for m in model.modules() if isinstance(m, Method)):
        for parameter in method.parameters():
            parameter.requires_grad_(gradients)
            parameter.grad = None
    return model
