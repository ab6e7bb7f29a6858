"""Operators in every form: a table of cases, and the check that each of them must pass."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.quantizer import Mode, quantizers

STEMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(3, 4, 1), (3, 12)),
    "2d": (lambda: nn.Conv2d(3, 4, 1), (3, 9, 8)),
    "3d": (lambda: nn.Conv3d(3, 4, 1), (3, 5, 6, 5)),
    "vector": (lambda: nn.Linear(6, 8), (6,)),
    "sequence": (lambda: nn.Linear(6, 8), (5, 6)),
}


@dataclass
class Case:
    """An operator: how a module that applies it after a stem is built."""

    operator: str
    build: Callable[[], nn.Module]
    stem: str
    sqnr: float = 18.0


class Apply(nn.Module):
    """A function as a module, with the parameters it may want."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5))

    def forward(self, x):
        wanted = [getattr(self, name) for name in self._parameters]
        return self.function(x, *wanted)


class Net(nn.Module):
    def __init__(self, stem, operator):
        super().__init__()
        self.stem, self.operator = stem, operator

    def forward(self, x):
        return self.operator(self.stem(x))


class Cases(dict[str, Case]):
    """Operators by the name of the case."""

    def add(self, name, operator, build, stem="2d", **options):
        """A module that is built once for each test."""
        assert name not in self, name
        self[name] = Case(operator, build, stem, **options)

    def function(self, name, operator, f, stem="2d", sqnr=18.0, **parameters):
        """A function of the stem's result and of parameters of these shapes."""
        self.add(name, operator, lambda: Apply(f, **parameters), stem, sqnr=sqnr)

    def each(self, backends=("onnxruntime", "openvino")):
        """Parametrize a test by case and backend."""
        pairs = [(name, backend) for name in self for backend in backends]
        return pytest.mark.parametrize(
            ("chosen", "backend"), [(self[n], b) for n, b in pairs], ids=map("-".join, pairs)
        )


def sqnr(reference, value):
    """Signal to quantization noise in decibels."""
    noise = float((reference - value).detach().pow(2).mean())
    return 10 * torch.log10(reference.pow(2).mean() / max(noise, 1e-20)).item()


def prepared(chosen, backend):
    """The net of a case, the same prepared, and the shape of one input."""
    torch.manual_seed(0)
    stem, shape = STEMS[chosen.stem]
    model = Net(stem(), chosen.build()).eval()
    for norm in model.modules():
        if isinstance(getattr(norm, "running_var", None), torch.Tensor):
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.5, 1.5)
            if norm.affine:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, 0, 0.2)
    x = torch.randn(2, *shape)
    schedules = ("remove_identity", "remove_dropout", "unbind_to_select", "products_to_linear", "split_activations")
    as_written = dict.fromkeys(schedules, False)
    return model, bw.prepare(model, x, backend, recipe={"schedules": as_written}), shape


def check(chosen, backend):
    """Exact with quantizers off, close with them on, differentiable, and known to the ledger."""
    model, quantized, shape = prepared(chosen, backend)
    with torch.no_grad():
        for batch in (2, 3, 1):
            x = torch.randn(batch, *shape)
            assert torch.equal(quantized(x.clone()), model(x.clone()))

    entries = bw.ledger_of(quantized).entries
    assert chosen.operator in {e.operator for e in entries}
    assert not [e.name for e in entries if e.operator == chosen.operator and e.reason == "unknown operator"]

    batches = [torch.randn(4, *shape) for _ in range(2)]
    bw.calibrate(quantized, [b.clone() for b in batches])
    assert {q.mode for q in quantizers(quantized).values()} == {Mode.QUANTIZE}
    x = batches[0]
    with torch.no_grad():
        reference, got = model(x.clone()), quantized(x.clone())
    assert got.shape == reference.shape
    assert sqnr(reference, got) > chosen.sqnr

    quantized(x.clone()).pow(2).sum().backward()
    gradients = {n: p.grad for n, p in quantized.named_parameters() if p.grad is not None}
    assert {"stem.weight", "stem.bias"} <= set(gradients)
    assert all(bool(torch.isfinite(g).all()) for g in gradients.values())
    assert any(float(g.abs().max()) > 0 for g in gradients.values())
