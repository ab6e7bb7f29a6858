"""The state of a quantizer in a checkpoint: its range, the spec that gives it meaning, and its mode.

A quantizer adds ``scale``, ``zero_point`` and ``about`` to the state dict; the last is a short text such as
``int8 symmetric tensor; 2; enabled``. One made by a descriptor adds only ``_amax``, as in pytorch-quantization; there
the text is in the state dict's metadata, which ``torch.save`` keeps. Text for another spec is an error. Without any
text, as in a checkpoint of pytorch-quantization, shapes must fit.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.quantizer.calibrators import Calibrator
from bitwright.quantizer.mode import Mode

if TYPE_CHECKING:
    from bitwright.quantizer.core import TensorQuantizer

ABOUT = "about"


class _Saved(NamedTuple):
    """What a state dict says about one quantizer."""

    about: str | None
    scale: Tensor | None
    zero_point: Tensor | None

    @classmethod
    def of(cls, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> "_Saved":
        """Remove the quantizer's entries from the state dict, since torch looks for none of them."""
        text, scale, zero_point = (state.pop(prefix + name, None) for name in (ABOUT, "scale", "zero_point"))
        about = metadata.get(ABOUT) if text is None else bytes(text.tolist()).decode()
        return cls(about, scale, zero_point)

    @property
    def missing(self) -> list[str]:
        """The missing half of a range, if only one half is present."""
        gone = [name for name in ("scale", "zero_point") if getattr(self, name) is None]
        return gone if len(gone) == 1 else []


def save_state(quantizer: "TensorQuantizer", destination: dict[str, Any], prefix: str) -> None:
    """Add the range, the spec and the mode to a state dict."""
    scale, zero_point = quantizer._stored()
    if scale.numel():
        destination[prefix + "scale"], destination[prefix + "zero_point"] = scale, zero_point
    text = f"{quantizer.spec}; {quantizer.mode.value}; {'enabled' if quantizer.enabled else 'disabled'}"
    if isinstance(quantizer.observer, Calibrator):
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})[ABOUT] = text
    else:
        destination[prefix + ABOUT] = torch.tensor(list(text.encode()), dtype=torch.uint8)


def load_state(
    quantizer: "TensorQuantizer",
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    missing: list[str],
    errors: list[str],
) -> bool:
    """Take the range and the mode from a state dict; return False, with the reason in ``errors``, if they do not fit.

    This also prepares what torch itself loads next: the buffer of amax, and the Parameters of the method.
    """
    if not any(key.startswith(prefix) for key in state) and ABOUT not in metadata:
        # A float checkpoint leaves what the method learned unchanged.
        learned = quantizer.method.named_parameters()
        state.update({f"{prefix}method.{name}": p.detach() for name, p in learned})
        return True
    saved = _Saved.of(state, prefix, metadata)
    missing += [prefix + name for name in saved.missing]
    try:
        _take_over(quantizer, saved)
    except ConfigError as error:
        errors.append(str(error))
        return False
    _make_room(quantizer, state, prefix)
    return True


def _take_over(quantizer: "TensorQuantizer", saved: _Saved) -> None:
    """Restore the saved mode and range of a quantizer, or raise and leave it unchanged."""
    switches = None if saved.about is None else _read(quantizer, saved.about)
    shape = torch.Size() if saved.scale is None else quantizer._fit(saved.scale.shape)
    if switches is not None:
        quantizer.mode, quantizer.enabled = switches
        quantizer.forget_range()
    if saved.scale is not None and saved.zero_point is not None:
        values = zip((saved.scale, saved.zero_point), quantizer._stored(), strict=True)
        quantizer._store(*(value.detach().to(known).reshape(shape).clone() for value, known in values))
        quantizer.method.start(*quantizer._stored())


def _read(quantizer: "TensorQuantizer", about: str) -> tuple[Mode, bool]:
    """Read the mode and the switch from the text, if it has the quantizer's spec."""
    try:
        spec, mode, switch = about.split("; ")
        found = Mode(int(mode)), {"enabled": True, "disabled": False}[switch]
    except (ValueError, KeyError):
        raise ConfigError(f"cannot read {about!r}, the state of the quantizer{quantizer._named()}") from None
    if spec != str(quantizer.spec):
        raise ConfigError(
            f"the quantizer{quantizer._named()} is '{quantizer.spec}', but the checkpoint has '{spec}': "
            "prepare the model as it was when saved"
        )
    return found


def _make_room(quantizer: "TensorQuantizer", state: dict[str, Any], prefix: str) -> None:
    """Create the buffers and Parameters that a state dict has, and rename those learned by pytorch-quantization."""
    device = quantizer._stored()[0].device
    amax, factor = (state.get(prefix + name) for name in ("_amax", "_pre_quant_scale"))
    if amax is not None:
        quantizer._store(amax=torch.empty_like(amax, device=device))
    if factor is not None:
        quantizer.pre_quant_scale = torch.empty_like(factor, device=device)
    for key in [k for k in state if k.startswith(f"{prefix}clip.")]:
        state[f"{prefix}method.{key.rpartition('.')[2]}"] = state.pop(key)
    for name, known in quantizer.method._parameters.items():
        saved = state.get(f"{prefix}method.{name}")
        if known is None and saved is not None:
            quantizer.method.learn(name, saved.to(device))
