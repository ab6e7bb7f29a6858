"""Convolutions, linear layers, matrix products, attention and embeddings, with all their arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.preparation import Verdict
from tests.nn.operators.harness import Cases, check, sqnr

CASES = Cases()
case, function = CASES.add, CASES.function

CONVS = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "uneven": {"padding": "uneven", "stride": "uneven"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "no bias": {"bias": False},
    "same": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "zeros": {"padding_mode": "zeros", "padding": 1},
    "reflect": {"padding_mode": "reflect", "padding": 1, "stride": 2},
    "replicate": {"padding_mode": "replicate", "padding": 2},
    "circular": {"padding_mode": "circular", "padding": "same"},
    "circular uneven": {"padding_mode": "circular", "padding": "uneven"},
    "reflect same": {"padding_mode": "reflect", "padding": "same"},
    "reflect valid": {"padding_mode": "reflect", "padding": "valid"},
}
TRANSPOSED = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2, "stride": 2},
    "no bias": {"bias": False, "stride": 2, "padding": 1},
    "uneven": {"padding": "uneven"},
}
UNEVEN = {1: (1,), 2: (1, 2), 3: (1, 2, 1)}


def settings(wish, d):
    return {key: UNEVEN[d] if value == "uneven" else value for key, value in wish.items()}


for d in (1, 2, 3):
    conv, transposed = getattr(nn, f"Conv{d}d"), getattr(nn, f"ConvTranspose{d}d")
    for key, wish in CONVS.items():
        kernel = 2 if "same" in key else 3
        case(
            f"nn.Conv{d}d {key}",
            f"conv{d}d",
            lambda c=conv, w=wish, d=d, k=kernel: c(4, 8, k, **settings(w, d)),
            f"{d}d",
        )
    for key, wish in TRANSPOSED.items():
        case(
            f"nn.ConvTranspose{d}d {key}",
            f"conv_transpose{d}d",
            lambda c=transposed, w=wish, d=d: c(4, 6, 3, **settings(w, d)),
            f"{d}d",
        )
    f, t = getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d")
    shape, kernel = (6, 4, *[3] * d), (4, 3, *[3] * d)
    function(f"F.conv{d}d", f"conv{d}d", lambda x, w, b, f=f: f(x, w, b), f"{d}d", weight=shape, bias=(6,))
    function(f"F.conv{d}d no bias", f"conv{d}d", lambda x, w, f=f: f(x, w), f"{d}d", weight=shape)
    function(
        f"F.conv{d}d positional",
        f"conv{d}d",
        lambda x, w, b, f=f: f(x, w, b, 2, 1, 1, 2),
        f"{d}d",
        weight=(6, 2, *[3] * d),
        bias=(6,),
    )
    function(
        f"F.conv{d}d keywords",
        f"conv{d}d",
        lambda x, w, b, f=f: f(input=x, weight=w, bias=b, padding="same", dilation=2),
        f"{d}d",
        weight=shape,
        bias=(6,),
    )
    function(
        f"F.conv_transpose{d}d positional",
        f"conv_transpose{d}d",
        lambda x, w, b, t=t: t(x, w, b, 2, 1, 1),
        f"{d}d",
        weight=kernel,
        bias=(3,),
    )
    function(
        f"F.conv_transpose{d}d groups",
        f"conv_transpose{d}d",
        lambda x, w, b, t=t: t(x, w, bias=b, stride=2, groups=2, dilation=1),
        f"{d}d",
        weight=kernel,
        bias=(6,),
    )


class OutputSize(nn.Module):
    """A transposed convolution with a given output size."""

    def __init__(self, how):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
        self.how = how

    def forward(self, x):
        small = F.max_pool2d(x, 2, ceil_mode=True)
        if self.how == "keyword":
            return self.up(small, output_size=x.shape[-2:])
        if self.how == "positional":
            return self.up(small, [small.shape[2] * 2, small.shape[3] * 2])
        return self.up(input=small, output_size=[x.shape[0], 4, small.shape[2] * 2, 8])


for how in ("keyword", "positional", "whole shape"):
    case(f"nn.ConvTranspose2d output_size {how}", "conv_transpose2d", lambda how=how: OutputSize(how))

case("nn.Linear", "linear", lambda: nn.Linear(8, 5), "vector")
case("nn.Linear no bias", "linear", lambda: nn.Linear(8, 5, bias=False), "sequence")
case("nn.Linear image", "linear", lambda: nn.Linear(8, 5), "2d")
function("F.linear", "linear", lambda x, w, b: F.linear(x, w, b), "vector", weight=(5, 8), bias=(5,))
function("F.linear no bias", "linear", lambda x, w: F.linear(x, w), "sequence", weight=(5, 8))
function(
    "F.linear keywords",
    "linear",
    lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "sequence",
    weight=(5, 8),
    bias=(5,),
)
for key, f in {
    "torch.matmul": lambda x: torch.matmul(x, x.transpose(1, 2)),
    "@": lambda x: x @ x.transpose(-2, -1),
    "matmul": lambda x: x.matmul(x.mT),
    "torch.bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "bmm": lambda x: x.bmm(x.permute(0, 2, 1)),
    "torch.matmul keyword": lambda x: torch.matmul(x, other=x.transpose(1, 2)),
}.items():
    function(f"matmul {key}", "matmul", f, "sequence")
function("torch.mm", "matmul", lambda x, w: torch.mm(x, w), "vector", weight=(8, 3))
function("mm", "matmul", lambda x, w: x.mm(w), "vector", weight=(8, 3))
for key, options in {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
}.items():
    function(
        f"F.scaled_dot_product_attention {key}",
        "scaled_dot_product_attention",
        lambda x, o=options: F.scaled_dot_product_attention(x, x * 0.5, x, **o),
        "sequence",
    )
function(
    "F.scaled_dot_product_attention mask",
    "scaled_dot_product_attention",
    lambda x, m: F.scaled_dot_product_attention(x, x, x, m),
    "sequence",
    mask=(5, 5),
)


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(dtype):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8, padding_idx=0)
            self.places = nn.Parameter(torch.randn(7, 8))
            self.fc = nn.Linear(8, 3)

        def forward(self, tokens):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.fc(self.words(tokens) + F.embedding(places, self.places))

    model, tokens = Words().eval(), torch.randint(0, 11, (2, 7), dtype=dtype)
    quantized = bw.prepare(model, tokens)
    for count in (7, 4):
        other = torch.randint(0, 11, (3, count), dtype=dtype)
        assert torch.equal(quantized(other), model(other))
    bw.calibrate(quantized, [tokens])
    assert sqnr(model(tokens), quantized(tokens)) > 25
    verdicts = {e.name: e.verdict for e in bw.ledger_of(quantized).entries}
    assert verdicts["words"] is Verdict.FLOAT
    assert verdicts["fc"] is Verdict.INTEGER
