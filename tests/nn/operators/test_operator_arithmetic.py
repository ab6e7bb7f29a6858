"""Arithmetic on tensors and numbers, in every form."""

import torch

from tests.nn.operators.harness import Cases, check

CASES = Cases()
case, function = CASES.add, CASES.function

for operator, functions in {
    "add": [
        lambda x, w: x + w,
        lambda x, w: w + x,
        lambda x, w: x + torch.tanh(x),
        lambda x, w: x + x,
        lambda x, w: torch.add(x, w),
        lambda x, w: torch.add(x, other=w),
        lambda x, w: torch.add(input=x, other=w),
        lambda x, w: torch.add(x, w, alpha=2),
        lambda x, w: x.add(w, alpha=0.5),
        lambda x, w: x.add_(w),
        lambda x, w: (x * 2).add_(w),
        lambda x, w: x + 1.5,
        lambda x, w: 1.5 + x,
    ],
    "sub": [
        lambda x, w: x - w,
        lambda x, w: 1.0 - x,
        lambda x, w: torch.sub(x, w, alpha=2),
        lambda x, w: torch.subtract(x, w),
        lambda x, w: x.sub(w),
        lambda x, w: x.sub_(0.5),
    ],
    "mul": [
        lambda x, w: x * w,
        lambda x, w: x * torch.sigmoid(x),
        lambda x, w: torch.mul(x, w),
        lambda x, w: torch.multiply(x, other=w),
        lambda x, w: x.mul(w),
        lambda x, w: x.mul_(w),
        lambda x, w: 2 * x,
    ],
    "div": [
        lambda x, w: x / (w.abs() + 1),
        lambda x, w: x / 3,
        lambda x, w: 1 / (x.abs() + 1),
        lambda x, w: torch.div(x, w.abs() + 1),
        lambda x, w: torch.true_divide(x, w.abs() + 1),
        lambda x, w: x.div(2.0),
        lambda x, w: x.div_(2.0),
    ],
}.items():
    for i, f in enumerate(functions):
        function(f"{operator} {i}", operator, f, weight=(4, 1, 1))


def in_place(x, w):
    x += w
    x *= 2
    x -= 0.5
    x /= 3
    return x


function("in-place operators", "add", in_place, weight=(4, 1, 1))
function("floor division", "div", lambda x: x + torch.div(x * 4, 2, rounding_mode="floor"))
for i, f in enumerate(
    [
        lambda x: torch.cat([x, x * 2], 1),
        lambda x: torch.cat((x, torch.tanh(x), x), dim=-1),
        lambda x: torch.cat(tensors=[x, x], dim=2),
        lambda x: torch.concat([x, x], dim=1),
        lambda x: torch.concatenate([x, x], dim=1),
        lambda x: torch.cat([x]),
    ]
):
    function(f"cat {i}", "cat", f)
function("stack", "stack", lambda x: torch.stack([x, x.tanh()], dim=1))


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)
