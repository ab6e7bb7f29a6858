"""Inputs keep their names in files, in whatever order the example inputs name them."""

import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright as bw


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a, b, c=None, flag=False):
        return self.first(a) - 2 * self.second(b) + 3 * c


class WithMore(Named):
    def forward(self, a, b, **more):
        return super().forward(a, b, more["c"])


@pytest.mark.parametrize("kind", [Named, WithMore])
@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("abc")])
def test_names_belong_to_their_arguments(kind, order, tmp_path):
    torch.manual_seed(0)
    example = {name: torch.randn(2, 3, 4) for name in order}
    model = bw.calibrate(bw.prepare(kind().eval(), example, "onnxruntime"), [example], progress=False)
    session = onnxruntime.InferenceSession(bw.export(model, tmp_path / "net.onnx"))
    fresh = {name: torch.randn(5, 3, 4) for name in "abc"}
    (found,) = session.run(None, {name: value.numpy() for name, value in fresh.items()})
    assert np.allclose(found, model(**fresh).detach().numpy(), atol=1e-5)
