"""Pools over one to three dimensions, with all their arguments."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.operators.harness import Cases, check

CASES = Cases()
case, function = CASES.add, CASES.function

MAX_POOLS = {
    "plain": {"kernel_size": 2},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilation": {"kernel_size": 2, "stride": 1, "dilation": 2},
    "ceil": {"kernel_size": 2, "ceil_mode": True},
}
AVG_POOLS = {
    "plain": {"kernel_size": 2},
    "padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    "ceil": {"kernel_size": 2, "stride": 2, "ceil_mode": True},
    "inside": {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
}
for d in (1, 2, 3):
    max_pool, avg_pool = getattr(nn, f"MaxPool{d}d"), getattr(nn, f"AvgPool{d}d")
    f_max_pool, f_avg_pool = getattr(F, f"max_pool{d}d"), getattr(F, f"avg_pool{d}d")
    for key, options in MAX_POOLS.items():
        case(f"nn.MaxPool{d}d {key}", f"max_pool{d}d", partial(max_pool, **options), f"{d}d")
        function(f"F.max_pool{d}d {key}", f"max_pool{d}d", partial(f_max_pool, **options), f"{d}d")
    for key, options in AVG_POOLS.items():
        case(f"nn.AvgPool{d}d {key}", f"avg_pool{d}d", partial(avg_pool, **options), f"{d}d")
        function(f"F.avg_pool{d}d {key}", f"avg_pool{d}d", partial(f_avg_pool, **options), f"{d}d")
    torch_pool = getattr(torch, f"max_pool{d}d")
    function(f"torch.max_pool{d}d", f"max_pool{d}d", lambda x, p=torch_pool: p(x, 2, 1, 1), f"{d}d")
    function(
        f"F.max_pool{d}d with indices",
        f"max_pool{d}d",
        lambda x, p=f_max_pool: p(x, 2, return_indices=True)[0],
        f"{d}d",
    )
    case(
        f"nn.MaxPool{d}d with indices",
        f"max_pool{d}d",
        lambda p=max_pool: nn.Sequential(p(2, return_indices=True), First()),
        f"{d}d",
    )
    function(
        f"F.avg_pool{d}d positional",
        f"avg_pool{d}d",
        lambda x, p=f_avg_pool: p(x, 3, 2, 1, True, False),
        f"{d}d",
    )
    if d > 1:
        case(f"nn.AvgPool{d}d divisor", f"avg_pool{d}d", partial(avg_pool, 2, divisor_override=3), f"{d}d")
    for size in (1, 2, {1: 3, 2: (3, None), 3: (None, 2, 1)}[d]):
        for kind in ("avg", "max"):
            operator = f"adaptive_{kind}_pool{d}d"
            module = getattr(nn, f"Adaptive{kind.title()}Pool{d}d")
            case(f"nn.{operator} {size}", operator, partial(module, size), f"{d}d")
            function(f"F.{operator} {size}", operator, partial(getattr(F, operator), output_size=size), f"{d}d")
    adaptive = getattr(F, f"adaptive_avg_pool{d}d")
    function(
        f"F.adaptive_avg_pool{d}d positional",
        f"adaptive_avg_pool{d}d",
        lambda x, p=adaptive: p(x, 1),
        f"{d}d",
    )


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)
