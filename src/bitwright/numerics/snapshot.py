"""A copy of a tensor that a compiled training step keeps for its backward pass.

A BatchNorm in training writes into its running statistics. torch.compile may recompute in the backward pass what the
forward pass has computed from them, and by then they have changed: gradients are wrong (torch 2.13). It never
recomputes a custom operator, so what is computed from a snapshot is computed from the old values.
"""

import torch
from torch import Tensor

from bitwright.numerics.kernel_operator import LIBRARY

LIBRARY.define("snapshot(Tensor x) -> Tensor")
LIBRARY.impl("snapshot", Tensor.clone, "CompositeExplicitAutograd")
torch.library.register_fake("bitwright::snapshot", torch.empty_like, lib=LIBRARY)

snapshot = torch.ops.bitwright.snapshot
