"""The BatchNorm folded into a layer: which statistics it uses in training, and how to freeze them.

In evaluation a folded BatchNorm is part of the quantized weight and bias,

    c = γ/√(running var + eps),   w' = quantize(w·c),   b' = (b - running mean)·c + β

While quantizers are off, it is applied after the layer, as in the float model. Training has two modes:

- **frozen**, the default: it uses running statistics, in the folded form, as deployed. γ and β still train.
- **by the batch**, after :func:`unfreeze_batchnorm` and in training mode: the layer computes with quantize(w·c)/c, the
  deployed weight before normalization; the BatchNorm then normalizes by the batch and moves its running statistics. The
  grid of the weight is still that of w·c by running statistics, so it does not fluctuate from batch to batch, and
  evaluation uses the folded form.

Frozen is the default because a calibrated network starts close to its optimum: with few bits and few epochs, moving
statistics cost accuracy. Batch statistics may help if rounding has changed the network much (two bits).
"""

from typing import Any

from torch import nn

from bitwright.nn.fold import BY_BATCH, FROZEN, NORMS
from bitwright.nn.layer import QuantLayer


def freeze_batchnorm(model: nn.Module) -> nn.Module:
    """Make every BatchNorm in ``model`` use its running statistics and leave them unchanged, even in training.

    Those folded into quantized layers do so anyway unless :func:`unfreeze_batchnorm` was called. This also freezes the
    others, and all of them while quantizers are off. It works on prepared models and on parts of them; γ and β still
    train. A checkpoint does not store it, so a script that resumes must call it again.

    Returns:
        The same model.
    """
    for norm in _norms(model):
        norm.__dict__.pop(BY_BATCH, None)
        if FROZEN not in norm.__dict__:
            setattr(norm, FROZEN, norm.register_forward_pre_hook(_stay_in_eval))
            norm.eval()
    return model


def unfreeze_batchnorm(model: nn.Module) -> nn.Module:
    """Make every BatchNorm in ``model``, folded or not, normalize by the batch in training mode.

    ::

        bw.unfreeze_batchnorm(model)
        for epoch in range(epochs):
            model.train()
            if epoch == epochs - 2:
                bw.freeze_batchnorm(model)

    Returns:
        The same model; modules that the user put into evaluation mode stay there.
    """
    for norm in _norms(model):
        setattr(norm, BY_BATCH, True)
        if FROZEN in norm.__dict__:
            norm.__dict__.pop(FROZEN).remove()
            norm.train(model.training)
    return model


def _norms(model: nn.Module) -> list[Any]:
    """Every BatchNorm in a model, and those outside it that are folded into its layers."""
    found: dict[Any, None] = {}
    for module in model.modules():
        folds = (*module.before, *module.after) if isinstance(module, QuantLayer) else ()
        for norm in (module, *(fold.norm for fold in folds)):
            if isinstance(norm, NORMS):
                found[norm] = None
    return list(found)


def _stay_in_eval(norm: nn.Module, _: object) -> None:
    norm.eval()
