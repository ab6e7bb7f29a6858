"""What calibrate leaves behind: tensors that can be trained, and a word on roundings that it cannot teach."""

import logging

import pytest
import torch
from torch import nn

import bitwright as bw


@pytest.mark.parametrize("method", ["FixedFakeQuantize", "LearnableFakeQuantize"])
def test_a_model_made_in_inference_mode_can_be_trained(method):
    x = torch.randn(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    with torch.inference_mode():
        model = bw.prepare(net, x, recipe={"weight": {"method": method}, "activation": {"method": method}})
        bw.calibrate(model, [x])
    model.train()
    model(x).sum().backward()
    assert float(model[0].weight.grad.abs().sum()) > 0
    swapped = bw.swap_modules(net, example_inputs=x)
    with torch.inference_mode():
        bw.calibrate(swapped, [x])
    swapped(x).sum().backward()
    assert float(swapped[0].weight.grad.abs().sum()) > 0


@pytest.mark.parametrize(("method", "word"), [("AdaRoundFakeQuantize", "adaround"), ("QDropFakeQuantize", "qdrop")])
def test_a_rounding_that_only_reconstruction_teaches_is_named(method, word, caplog):
    x = torch.randn(4, 6)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    model = bw.prepare(net, x, recipe={"weight": {"method": method}})
    with caplog.at_level(logging.WARNING):
        bw.calibrate(model, [x])
        bw.calibrate(model, [x])
    note = (
        f"{method} was chosen for 2 tensors (the first is 0.weight), but calibration alone rounds them to nearest: "
        f"bw.reconstruct(model, batches, method={word!r}) learns the rounding"
    )
    assert [record.getMessage() for record in caplog.records] == [note, note]
    assert bw.ledger_of(model).notes.count(note) == 1


def test_a_learned_rounding_is_not_complained_about(caplog):
    x = torch.randn(4, 6)
    model = bw.prepare(nn.Sequential(nn.Linear(6, 2)).eval(), x, recipe={"weight": {"method": "AdaRoundFakeQuantize"}})
    bw.calibrate(model, [x])
    quantizer = model[0].weight_quantizer
    quantizer.method.init(model[0].weight, *quantizer.qparams())
    caplog.clear()
    bw.calibrate(model, [x])
    assert not caplog.records


@pytest.mark.parametrize("method", ["adaround", "qdrop"])
def test_what_reconstruction_has_taught_is_no_longer_noted(method):
    x = torch.randn(16, 6)
    asked = {"weight": {"method": "AdaRoundFakeQuantize"}, "activation": {"method": "QDropFakeQuantize"}}
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    model = bw.calibrate(bw.prepare(net, x, recipe={"preset": "W4A4", **asked}), [x])
    named = lambda: [note.split()[0] for note in bw.ledger_of(model).notes if "bw.reconstruct" in note]  # noqa: E731
    assert sorted(named()) == ["AdaRoundFakeQuantize", "QDropFakeQuantize"]
    bw.reconstruct(model, [x], method, steps=2)
    assert named() == ([] if method == "qdrop" else ["QDropFakeQuantize"])
