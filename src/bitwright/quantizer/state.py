"""The state of a quantizer in a checkpoint: its range, with the spec that gives it its meaning, and its mode.

A quantizer adds ``scale``, ``zero_point`` and ``about`` to the state dict; the last is a short text such as
``int8 symmetric tensor; 2; enabled``. One made by a descriptor adds only ``_amax``, as in pytorch-quantization; there
the text is in the state dict's metadata, which ``torch.save`` keeps. A text of another spec is an error. Without a
text, as in a checkpoint of pytorch-quantization, shapes must fit.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.quantizer.calibrators import Calibrator
from bitwright.quantizer.mode import Mode

if TYPE_CHECKING:
    from bitwright.quantizer.core import TensorQuantizer

_ABOUT = "about"
_AMAX = ("_amax", "_pre_quant_scale")
_CLIP = ("clip_value_min", "clip_value_max")


def save_state(quantizer: "TensorQuantizer", destination: dict[str, Any], prefix: str) -> None:
    """Add the range, the spec and the mode to a state dict."""
    scale, zero_point = quantizer._stored()
    if scale.numel():
        destination[prefix + "scale"], destination[prefix + "zero_point"] = scale, zero_point
    text = f"{quantizer.spec}; {quantizer.mode.value}; {'enabled' if quantizer.enabled else 'disabled'}"
    if isinstance(quantizer.observer, Calibrator):
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})[_ABOUT] = text
    else:
        destination[prefix + _ABOUT] = torch.tensor(list(text.encode()), dtype=torch.uint8)


def load_state(
    quantizer: "TensorQuantizer",
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    missing: list[str],
    errors: list[str],
) -> bool:
    """Take the range and the mode out of a state dict; False if they do not fit, which is then in ``errors``.

    What torch itself loads next is made ready: the buffer of amax, and the Parameters of the method.
    """
    if not any(key.startswith(prefix) for key in state) and _ABOUT not in metadata:
        # A float checkpoint: what the method has learned stays as it is.
        learned = quantizer.method.named_parameters()
        state.update({f"{prefix}method.{name}": p.detach() for name, p in learned})
        return True
    text = state.pop(prefix + _ABOUT, None)
    text = metadata.get(_ABOUT) if text is None else bytes(text.tolist()).decode()
    given = {name: state.pop(prefix + name) for name in ("scale", "zero_point") if prefix + name in state}
    if len(given) == 1:
        missing.append(prefix + ("scale" if "zero_point" in given else "zero_point"))
        return True
    try:
        mode, enabled = _understood(quantizer, text)
        shape = quantizer._fit(given["scale"].shape) if given else None
    except ConfigError as error:
        errors.append(str(error))
        return False
    if text is not None:
        quantizer.mode, quantizer.enabled = mode, enabled
        quantizer.forget_range()
    _make_room(quantizer, state, prefix)
    if given:
        scale, zero_point = quantizer._stored()
        values = (given["scale"].detach().to(scale), given["zero_point"].detach().to(zero_point))
        quantizer._store(*(v.reshape(shape).clone() for v in values))
        quantizer.method.start(*quantizer._stored())
    return True


def _understood(quantizer: "TensorQuantizer", text: str | None) -> tuple[Mode, bool]:
    """The mode and the switch in a text, if its spec is that of the quantizer."""
    if text is None:
        return quantizer.mode, quantizer.enabled
    try:
        spec, mode, switch = text.split("; ")
        found = Mode(int(mode)), {"enabled": True, "disabled": False}[switch]
    except (ValueError, KeyError):
        raise ConfigError(f"cannot read {text!r}, the state of the quantizer{quantizer._named()}") from None
    if spec != str(quantizer.spec):
        raise ConfigError(
            f"the quantizer{quantizer._named()} is '{quantizer.spec}', but the checkpoint has '{spec}': "
            "prepare the model as it was when it was saved"
        )
    return found


def _make_room(quantizer: "TensorQuantizer", state: dict[str, Any], prefix: str) -> None:
    device = quantizer._stored()[0].device
    for name in _AMAX:
        value: Tensor | None = state.get(prefix + name)
        if value is not None and name == "_amax":
            quantizer._store(amax=torch.empty_like(value, device=device))
        elif value is not None:
            quantizer.pre_quant_scale = torch.empty_like(value, device=device)
    for name in _CLIP:  # as pytorch-quantization saves what it learns
        if prefix + f"clip.{name}" in state:
            state[prefix + f"method.{name}"] = state.pop(prefix + f"clip.{name}")
