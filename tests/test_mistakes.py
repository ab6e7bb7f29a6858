"""Mistakes that newcomers make are answered with what was given, what is wanted, and what to do."""

import pytest
import torch
from torch import nn

import bitwright as bw

X = torch.randn(2, 3, 8, 8)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x.flatten(2))


@pytest.fixture(scope="module")
def model():
    return bw.calibrate(bw.prepare(net(), X), [X])


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: bw.prepare(Other, X), "not the class Other: create one"),
        (lambda: bw.prepare(net(), (4, 3, 8, 8)), r"if that is a shape, give torch.randn\(4, 3, 8, 8\)"),
        (lambda: bw.prepare(net(), X.numpy()), r"a NumPy array, not a tensor, of float32\[2, 3, 8, 8\]"),
        (lambda: bw.prepare(net(), X, X), "backend must be a name or a Backend, not tensor"),
        (lambda: bw.calibrate(net(), [X]), r"give what prepare\(model, inputs\) returns"),
    ],
    ids=["class", "shape", "numpy", "inputs side by side", "float model"],
)
def test_before_there_is_a_model(mistake, words):
    with pytest.raises(bw.BitwrightError, match=words) as caught:
        mistake()
    assert len(str(caught.value)) < 2000


def test_numpy_arrays_are_named(model, tmp_path):
    path = bw.export(model, tmp_path / "net.onnx")
    with pytest.raises(bw.BitwrightError, match=r"the file takes input, and the batch is \(a NumPy array"):
        bw.verify(model, path, [X.numpy()])


def test_budgets_have_units(model):
    with pytest.raises(bw.BitwrightError, match=r"keeps size at 0.5 bytes: the least possible is \d+ bytes"):
        bw.search_bits(model, [X], {"size": 0.5})


def test_a_loss_is_a_function(model):
    with pytest.raises(bw.BitwrightError, match="cross_entropy, not 'ce'"):
        bw.train(model, [(X, torch.zeros(2, dtype=torch.long))], "ce")
