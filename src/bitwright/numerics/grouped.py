"""Products of groups of rows, each with a matrix of its own, as one operator: what experts compute on their tokens."""

import itertools

import torch
from torch import Tensor

from bitwright.numerics.kernel_operator import LIBRARY

LIBRARY.define("grouped_product(Tensor x, Tensor weight, Tensor ends) -> Tensor")

_product = torch.ops.bitwright.grouped_product


def grouped_product(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.grouped_mm`` of rows, which torch's exporter takes in half precision only.

    ``x`` (rows, inputs) is sorted by group, and group i of ``weight`` (groups, inputs, outputs) serves the rows up to
    ``offs[i]``; rows after the last have no defined result.
    """
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        return torch.nn.functional.grouped_mm(x, weight, offs=offs, bias=bias, out_dtype=out_dtype)
    found = _product(x, weight, offs)
    return found if out_dtype is None else found.to(out_dtype)


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends[:-1].tolist(), len(x)]
    return torch.cat([x[a:b] @ w for (a, b), w in zip(itertools.pairwise(bounds), weight, strict=True)])


LIBRARY.impl("grouped_product", _grouped_product, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::grouped_product", lib=LIBRARY)
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))
