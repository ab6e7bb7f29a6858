"""float_state_dict: the part of a prepared model's state that belongs to the float model."""

from collections import OrderedDict
from typing import Any

from torch import nn

from bitwright.quantizer.core import TensorQuantizer


def float_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return what of a model's ``state_dict`` loads into the float model it was made from, with ``strict=True``.

    ::

        net.load_state_dict(bw.float_state_dict(model))

    Names are those of the float model. Folded norms are in it as they are, so the float model computes what the
    prepared one does with its quantizers off; after training it has the trained weights. Where ``equalize`` moved
    factors past a ReLU6, the limits of its channels are in it too, and the float model, which has one, refuses it.

    Args:
        model: a prepared model, or one with QModules or quantizers of its own.
    """
    state = model.state_dict()
    found = [n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, TensorQuantizer)]
    within, itself = tuple(f"{name}." if name else "" for name in found), set(found)
    kept = OrderedDict((key, value) for key, value in state.items() if not key.startswith(within))
    metadata = getattr(state, "_metadata", {})
    kept._metadata = OrderedDict(  # pyrefly: ignore
        (name, value) for name, value in metadata.items() if name not in itself and not name.startswith(within)
    )
    return kept
