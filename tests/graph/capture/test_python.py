"""Capture: Python that looks at shapes, types and containers is traced."""

import math

import pytest
import torch
import torch.nn.functional as F

import bitwright as bw
from bitwright.preparation import Verdict
from tests.graph.capture.capturing import Net, image, prepared


def by_shape(self, x):
    x = self.conv(x)
    if x.shape[1] == 4 and x.dim() == 4:
        x = x * 2
    if x.size(2) > 100:
        raise ValueError("too large")
    b, c, h, w = x.shape
    assert c == 4
    return x.view(b, c * h, w)


def by_length(self, x):
    x = self.conv(x)
    total = 0
    for i in range(len(x.shape)):
        total = total + x.shape[i] * 0 + i
    return x + total


def by_iteration(self, x):
    parts = [self.conv(t[None]) for t in x]
    return torch.cat(parts) + len(parts)


def by_type(self, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError("a tensor, please")
    x = self.conv(x)
    assert torch.is_tensor(x)
    assert isinstance(x.shape, tuple)
    assert isinstance(x.shape[0], int)
    return x if x.dtype == torch.float32 and x.is_floating_point() else x.float()


def by_unpacking(self, x):
    b, _, h, w = self.conv(x).size()
    *rest, last = x.shape
    return self.conv(x).reshape(b, 4, h * w)[:, :, : last // 2] * (len(rest) - 2)


def by_arange(self, x):
    x = self.conv(x)
    places = torch.arange(x.shape[3], device=x.device, dtype=x.dtype)
    return x + places + torch.zeros(x.shape[0], 1, 1, 1) + torch.ones(x.size()) + x.new_full((x.shape[0], 1, 1, 1), 2)


def by_buffer(self, x):
    x = self.conv(x)
    return x + self.table[: x.shape[2], : x.shape[3]] + self.table[0, 0]


def by_split(self, x):
    a, b = self.conv(x).chunk(2, dim=1)
    c, (d, e) = a, b.split(1, 1)
    return c + torch.cat([d, e], 1)


def by_arithmetic(self, x):
    h, w = x.shape[-2:]
    x = F.pad(self.conv(x), (0, (4 - w % 4) % 4, 0, (4 - h % 4) % 4))
    return F.interpolate(x, size=(int(h * 1.5), max(w, 3))) / x.numel() ** 0.5


def by_math(self, x):
    x = self.conv(x)
    return x * x.shape[1] ** -0.5 + x.ndim + x.stride(0) * 0 + x.nelement() * 0


def by_dict(self, x):
    found = {"a": self.conv(x), "b": x}
    for key, value in found.items():
        found[key] = value.mean(1)
    return found["a"] + found["b"]


def by_zip(self, x):
    x = self.conv(x)
    y = [a * i for i, a in enumerate(x.unbind(1))]
    return torch.stack([a + b for a, b in zip(y, x.unbind(1), strict=True)], 1)


def by_attribute(self, x):
    x = self.conv(x)
    return x.mT + x.data.abs() + x.grad_fn.__class__.__name__.count("zzz")


def by_condition(self, x):
    x = self.conv(x)
    y = x if x.shape[0] > 0 and not self.training else x * 5
    return y.to(x.dtype).to(x.device).type_as(x)


def by_reverse(self, x):
    x = self.conv(x)
    return sum(reversed(list(x.unbind(1)))) + 1


def by_string(self, x):
    assert "cuda" not in str(x.device)
    assert f"{x.shape[1]:02d} {x.shape[2]}" == "03 8"
    return self.conv(x) if f"{x.ndim}d" == "4d" and str(x.shape[1]) == "3" else x


def by_key(self, x):
    return self.conv(x) * {3: 1.0, 4: 2.0}[x.shape[1]] + (x.shape[2] in {8, 9}) * 1.0


def by_rounding(self, x):
    half, rest = divmod(x.shape[2], 2)
    size = (round(x.shape[2] * 0.7), math.ceil(x.shape[3] / 3) + abs(rest - half))
    return F.adaptive_avg_pool2d(self.conv(x), size)


def by_conversion(self, x):
    x = self.conv(x.half().to(torch.float32)).double().float()
    return self.conv(x[:, :3].to(x.dtype)) + self.conv(x[:, 1:].type(torch.float32))


BODIES = [
    by_shape,
    by_length,
    by_type,
    by_unpacking,
    by_arange,
    by_split,
    by_arithmetic,
    by_math,
    by_dict,
    by_zip,
    by_attribute,
    by_condition,
    by_reverse,
    by_string,
    by_key,
    by_rounding,
    by_conversion,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_python_that_looks_at_tensors(body):
    quantized = prepared(Net(body), image(2), image(3), image(1))
    assert {e.verdict for e in bw.ledger_of(quantized).entries if e.name == "conv"} == {Verdict.INTEGER}


@pytest.mark.parametrize("body", [by_arange, by_unpacking, by_shape], ids=lambda f: f.__name__)
def test_sizes_stay_free(body):
    prepared(Net(body), image(2, 8), image(2, 12), image(1, 10))


def test_numbers_that_python_needs_are_decisions():
    quantized = prepared(Net(by_arithmetic), image(2, 8))
    assert {d.reader for d in bw.ledger_of(quantized).guards} == {"int()", "if"}


def test_a_buffer_indexed_by_sizes():
    model = Net(by_buffer, table=torch.randn(16, 16))
    quantized = prepared(model, image(2, 8), image(3, 12), image(1, 16))
    assert "table" in quantized.state_dict()


def test_iterating_over_a_batch_is_a_decision():
    quantized = prepared(Net(by_iteration), image(2), image(2))
    decisions = bw.ledger_of(quantized).guards
    assert [(d.reader, d.where.rsplit(":", 1)[0].rsplit("/", 1)[-1]) for d in decisions][:1] == [
        ("for", "test_python.py")
    ]


def test_decisions_name_the_line():
    def body(self, x):
        if x.shape[0] > 1:
            return self.conv(x)
        return self.conv(x) * 2

    quantized = prepared(Net(body), image(2))
    (decision,) = bw.ledger_of(quantized).guards
    line = body.__code__.co_firstlineno + 1
    assert decision.reader == "if"
    assert decision.where == f"{__file__}:{line}"
