"""What a described quantizer adds to a checkpoint: its settings, as small tensors."""

from typing import Any

import torch

from bitwright.quantizer.descriptor import QuantDescriptor
from bitwright.quantizer.mode import Mode

_FLAGS = ("unsigned", "narrow_range", "fake_quant", "learn_amax")
KEYS = ("mode", "num_bits", "axis", "flags", "scale_amax")


def save_described(
    descriptor: QuantDescriptor, mode: Mode, enabled: bool, destination: dict[str, Any], prefix: str
) -> None:
    """Add the settings to a state dict; what is None is an empty tensor."""
    bits = descriptor.num_bits
    values = {
        "mode": torch.tensor([mode.value, enabled], dtype=torch.uint8),
        "num_bits": torch.tensor(bits if isinstance(bits, tuple) else (bits,), dtype=torch.uint8),
        "axis": torch.tensor(descriptor.axes, dtype=torch.int8),
        "flags": torch.tensor([getattr(descriptor, name) for name in _FLAGS], dtype=torch.bool),
        "scale_amax": torch.tensor(
            [] if descriptor.scale_amax is None else [descriptor.scale_amax], dtype=torch.float64
        ),
    }
    destination.update({prefix + key: value for key, value in values.items()})


def load_described(
    now: QuantDescriptor, state_dict: dict[str, Any], prefix: str
) -> tuple[QuantDescriptor, Mode, bool] | None:
    """Take the settings out of a state dict, or return None where it has none."""
    found = {key: state_dict.pop(prefix + key, None) for key in KEYS}
    if any(value is None for value in found.values()):
        return None
    bits, axis, factor = (found[key].tolist() for key in ("num_bits", "axis", "scale_amax"))
    changes = {
        "num_bits": bits[0] if len(bits) == 1 else tuple(bits),
        "axis": None if not axis else axis[0] if len(axis) == 1 else tuple(axis),
        "scale_amax": factor[0] if factor else None,
        "amax": None if found["flags"][-1] else now.amax,  # a learned range is in the Parameters
        **dict(zip(_FLAGS, found["flags"].tolist(), strict=True)),
    }
    return now.with_(**changes), Mode(int(found["mode"][0])), bool(found["mode"][1])
