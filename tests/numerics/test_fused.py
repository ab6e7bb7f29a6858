"""Compiled kernels: the bits of eager ones, when they are compiled, and what happens to wrong ones."""

import logging
import math

import torch

from bitwright.numerics import qdq, quantize_dequantize
from bitwright.numerics.fused import SMALL, Fused, repeated
from tests.numerics.naive import naive


def test_the_compiled_kernel_gives_the_same_bits(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    x = 3 * torch.randn(4, 16, SMALL // 16)
    x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    scale, zero = torch.rand(16, 1) * 0.1 + 0.01, torch.randint(0, 256, (16, 1)).float()
    forward, backward = Fused(qdq.nearest_level.eager), Fused(qdq.straight_through.eager)
    for fused, args in ((forward, (x,)), (backward, (x, torch.randn_like(x)))):
        got = fused(*args, scale, zero, 0, 255)
        (kernel,) = fused._kernels.values()
        assert kernel is not fused.eager
        expected = fused.eager(*args, scale, zero, 0, 255)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_one_compiled_kernel_serves_views_of_all_shapes(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    monkeypatch.setattr(qdq.nearest_level, "_kernels", {})
    scale, zero = torch.tensor(0.1), torch.tensor(7, dtype=torch.int32)
    shapes = [(8, 4, 32, 32), (5, 77, 64), (3, 2, 5, 7, 211), (2, 100, 100), (40000,), (7, 3001), (2, 3, 4, 5, 6, 53)]
    tensors = [torch.randn(s) for s in shapes]
    tensors += [t.transpose(0, -1) for t in tensors] + [t.unsqueeze(0)[0].unflatten(0, (1, -1)) for t in tensors]
    for x in tensors:
        got = quantize_dequantize(x, scale, zero, 0, 255)
        assert torch.equal(got, (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale)
    (kernel,) = qdq.nearest_level._kernels.values()
    assert kernel is not qdq.nearest_level.eager  # it would be, had torch given up recompiling


def test_compilation_waits_until_it_pays(monkeypatch):
    monkeypatch.delenv("BITWRIGHT_COMPILE", raising=False)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    monkeypatch.setattr("bitwright.numerics.fused.WARM_UP", 3 * SMALL)
    fused = Fused(lambda x: x + 1)
    small, large = torch.zeros(SMALL - 1), torch.zeros(SMALL)
    for _ in range(9):
        fused(small)
    for _ in range(3):
        fused(large)
    assert compiled == []
    assert fused(large)[0] == 1
    assert len(compiled) == 1
    monkeypatch.setenv("BITWRIGHT_COMPILE", "0")
    assert not fused._worth_compiling(large)


def test_what_cannot_be_compiled_runs_eagerly(monkeypatch, caplog):
    def refuse(*_args, **_options):
        def run(*_):
            raise RuntimeError("no compiler here")

        return run

    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", refuse)
    fused = Fused(qdq.nearest_level.eager)
    x, scale, zero = torch.randn(SMALL), torch.tensor(0.1), torch.tensor(0.0)
    with caplog.at_level(logging.WARNING):
        first, second = (fused(x, scale, zero, -8, 7) for _ in range(2))
    assert torch.equal(first[:9], naive(x[:9], scale, zero, -8, 7)[1])
    assert torch.equal(first, second)
    assert len(caplog.records) == 1
    assert "could not be compiled (RuntimeError: no compiler here); it runs eagerly" in caplog.text


def test_work_that_is_repeated_counts_ahead(monkeypatch):
    monkeypatch.delenv("BITWRIGHT_COMPILE", raising=False)
    doubled, x = Fused(_doubled), torch.ones(SMALL)
    doubled(x)
    with repeated(10):
        doubled(x)
    assert doubled._work == 11 * SMALL
    with repeated(1):
        doubled(x)
    assert doubled._work == 12 * SMALL


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2
