"""Unwrap a copied model: remove ``torch.compile``, and weights that are computed at every call.

In evaluation a parametrized weight (``torch.nn.utils.parametrizations``, the older ``weight_norm`` and
``spectral_norm``) is the same at every call. It is computed once and becomes a plain parameter, so that its layer can
be quantized. The copy then has ``conv.weight`` where the original has ``conv.parametrizations.weight.original0``: load
a state dict into the original, and prepare it again.
"""

from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from bitwright.graph.capture.failures import call_model
from bitwright.graph.differences import difference
from bitwright.graph.names import replace_modules
from bitwright.modes import random_numbers_kept
from bitwright.torch_internals import compiled_original, pre_hooks


def unwrap(model: nn.Module) -> nn.Module:
    """A module without ``torch.compile``, and so its parts, which are changed in place."""
    model = compiled_original(model) or model
    originals = {module: compiled_original(module) for module in model.modules()}
    replace_modules(model, {module: original for module, original in originals.items() if original is not None})
    return model


def fold_parametrizations(model: nn.Module) -> bool:
    """Compute every parametrized tensor once; say whether there was one."""
    folded = False
    with random_numbers_kept():
        for module in list(model.modules()):
            folded |= parametrize.is_parametrized(module) and _fold_class(module)
            for hook in [h for h in pre_hooks(module) if isinstance(h, WeightNorm | SpectralNorm)]:
                remove = remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm
                call_model(remove, module, hook.name)
                folded = True
    return folded


def _fold_class(module: nn.Module) -> bool:
    """Give a parametrized module its own class again, unless its weights are drawn at random; say whether it has it.

    Torch's function for this would change the class that the copy shares with the original.
    """
    lists = dict(module.get_submodule("parametrizations").named_children())
    computed, again = ({name: call_model(getattr, module, name) for name in lists} for _ in range(2))
    if difference(computed, again):
        return False
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]
    for name, value in computed.items():
        trains = _trains(lists[name])
        if trains is None:
            module.register_buffer(name, value.detach().clone())
        else:
            module.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=trains))
    return True


def _trains(parametrization: nn.Module) -> bool | None:
    """Whether a parameter is computed that trains; None for a buffer."""
    originals = [p for name, p in parametrization._parameters.items() if name.startswith("original") and p is not None]
    return any(p.requires_grad for p in originals) if originals else None
