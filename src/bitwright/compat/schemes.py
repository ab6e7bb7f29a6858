"""Torch's names for how a tensor is quantized."""

import torch

from bitwright.spec import PerTensor, QuantSpec


def qscheme_of(spec: QuantSpec) -> torch.qscheme:
    """``torch.per_channel_affine`` or one of its like."""
    grain = "tensor" if isinstance(spec.granularity, PerTensor) else "channel"
    return getattr(torch, f"per_{grain}_{'symmetric' if spec.symmetric else 'affine'}")
