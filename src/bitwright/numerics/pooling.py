"""Global average pooling as one operator, so that the file has GlobalAveragePool, which runs in integers."""

import torch
from torch import Tensor

from bitwright.numerics.kernel_operator import LIBRARY

LIBRARY.define("global_average_pool(Tensor x) -> Tensor")

global_average_pool = torch.ops.bitwright.global_average_pool


def _global_average_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


LIBRARY.impl("global_average_pool", _global_average_pool, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::global_average_pool", lib=LIBRARY)
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], *(1 for _ in x.shape[2:])))
