"""The BatchNorm folded into a layer: its statistics, whose they are in training, and how to freeze them.

In evaluation a folded BatchNorm is part of the weight and bias that are quantized,

    c = γ/√(running var + eps),   w' = quantize(w·c),   b' = (b - running mean)·c + β

While quantizers are off, it is applied after the layer, as in the float model. In training there are two ways:

- **frozen**, by running statistics, where nothing else is said: the folded form, as deployed. γ and β go on training.
- **by the batch**, after :func:`unfreeze_batchnorm` and in training mode: the layer computes with quantize(w·c)/c, the
  deployed weight before normalisation; the BatchNorm then normalises by the batch and moves its running statistics. The
  weight is still quantized on the grid of w·c, by running statistics, so that it does not tremble with the batch, and
  evaluation is the folded form.

Frozen is the default: a network that was calibrated begins close to its optimum, and on few bits and in few epochs
moving statistics cost accuracy. Batch statistics may help where rounding has changed the network much (two bits).
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_FROZEN, _BY_BATCH = "_statistics_frozen", "_statistics_by_batch"


def freeze_batchnorm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm in ``model`` go by its running statistics, and leave these as they are, also in training.

    Those folded into quantized layers do so anyway, unless :func:`unfreeze_batchnorm` was called; this also holds for
    the others, and while quantizers are off. It works on prepared models and on parts of them; γ and β go on training.
    It is not part of a checkpoint: a script that resumes calls it again.

    Returns:
        The same model.
    """
    for norm in _norms(model):
        norm.__dict__.pop(_BY_BATCH, None)
        if _FROZEN not in norm.__dict__:
            setattr(norm, _FROZEN, norm.register_forward_pre_hook(_stay_in_eval))
            norm.eval()
    return model


def unfreeze_batchnorm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm in ``model``, also those folded into quantized layers, go by the batch in training mode.

    ::

        bw.unfreeze_batchnorm(model)
        for epoch in range(epochs):
            model.train()
            if epoch == epochs - 2:
                bw.freeze_batchnorm(model)

    Returns:
        The same model; what the user has put into evaluation mode stays there.
    """
    for norm in _norms(model):
        setattr(norm, _BY_BATCH, True)
        if _FROZEN in norm.__dict__:
            norm.__dict__.pop(_FROZEN).remove()
            norm.train(model.training)
    return model


def uses_batch(norm: BatchNorm) -> bool:
    """Whether a BatchNorm that is folded into a quantized layer normalises by the batch now."""
    return norm.training and _BY_BATCH in norm.__dict__


def multiplier(norm: BatchNorm) -> Tensor:
    """What a BatchNorm multiplies each channel by in evaluation, γ/√(running var + eps)."""
    factor = torch.rsqrt(statistics(norm)[1] + norm.eps)
    return factor if norm.weight is None else factor * norm.weight


def statistics(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """The running mean and variance."""
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError(f"a {type(norm).__name__} without running statistics cannot be folded")
    return norm.running_mean, norm.running_var


def _norms(model: nn.Module) -> list[Any]:
    """Every BatchNorm of a model, and those folded into its layers that are elsewhere."""
    found: dict[Any, None] = {}
    for module in model.modules():
        for norm in (module, getattr(module, "folded_norm", None)):
            if isinstance(norm, BatchNorm | nn.SyncBatchNorm):
                found[norm] = None
    return list(found)


def _stay_in_eval(norm: nn.Module, _: Any) -> None:  # noqa: ANN401
    norm.eval()
