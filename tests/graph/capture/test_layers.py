"""Capture: torch's own layers, and layers derived from them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.preparation import Verdict
from tests.graph.capture.capturing import image, prepared


@pytest.mark.parametrize(
    ("leaf", "call"),
    [
        (lambda: nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x)[0]),
        (lambda: nn.GRU(8, 8, num_layers=2, batch_first=True), lambda m, x: m(x)[1].transpose(0, 1)),
        (lambda: nn.Bilinear(8, 8, 8), lambda m, x: m(x, x)),
    ],
    ids=["LSTM", "GRU", "Bilinear"],
)
def test_what_torch_computes_in_one_go_stays_float_and_is_listed(leaf, call):
    class Wrap(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.leaf, self.last = nn.Linear(6, 8), leaf(), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(call(self.leaf, self.first(x)))

    model = Wrap()
    quantized = prepared(model, torch.randn(2, 5, 6), torch.randn(3, 5, 6))
    entries = {e.name: e for e in bw.ledger_of(quantized).entries}
    assert entries["leaf"].verdict is Verdict.FLOAT
    hint = "schedules: {split_recurrent: true} quantizes LSTM and GRU"
    reasons = {
        nn.Bilinear: "unknown operator",
        nn.LSTM: "too small: onnxruntime computes it faster in float",
        nn.GRU: f"onnxruntime has no integer GRU; {hint}",
    }
    assert entries["leaf"].reason == reasons[type(model.leaf)]
    assert entries["leaf"].operator == type(model.leaf).__name__
    assert entries["first"].verdict is entries["last"].verdict is Verdict.INTEGER
    assert type(quantized.leaf) is type(model.leaf)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = torch.randn(2, 5, 6)
    quantized = bw.prepare(model, x)
    assert torch.allclose(quantized(x), model(x), atol=1e-6)
    verdicts = {e.name: e.verdict for e in bw.ledger_of(quantized).entries}
    assert verdicts["1.layers.0.linear1"] is verdicts["1.layers.1.linear2"] is Verdict.INTEGER


def test_a_subclass_of_a_layer_is_entered():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Standardized(4, 4, 3, padding=1))
    quantized = prepared(model, image(2), image(3))
    operators = [e.operator for e in bw.ledger_of(quantized).entries if e.verdict is Verdict.INTEGER]
    assert operators == ["conv2d", "conv2d"]


def test_weight_norm_by_hook_and_by_parametrization():
    old = torch.nn.utils.weight_norm(nn.Linear(6, 4))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(6, 6), old, new)
    quantized = prepared(model, torch.randn(2, 6), torch.randn(3, 6))
    x = torch.randn(8, 6)
    bw.calibrate(quantized, [x])
    assert torch.allclose(quantized(x), model(x), atol=0.05)
