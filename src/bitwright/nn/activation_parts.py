"""What activations are split into, beyond operators that torch has."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply by a gate; where that is ``sigmoid(x)``, give SiLU's own bits, which differ from the product's last."""
    return torch.where(gate == torch.sigmoid(x), F.silu(x), x * gate)
