"""prepare copies a model's parameters once: large models fit where two of them do."""

import torch
from torch import nn

import bitwright as bw
from bitwright.graph.capture import run


def stored(model):
    """The memory that the tensors of a model lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}


def test_parameters_are_copied_once(monkeypatch):
    copies = []
    original = run.copy_model
    monkeypatch.setattr(run, "copy_model", lambda model: copies.append(1) or original(model))
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())
    before, prepared = stored(model), bw.prepare(model, torch.randn(1, 3, 8, 8))
    assert copies == [1]
    assert not before.keys() & stored(prepared).keys()
    assert sum(stored(prepared).values()) < sum(before.values()) + 1000  # and a few words for each quantizer
