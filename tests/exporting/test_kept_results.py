"""Results that other operators read stay as they are, whatever onnxruntime makes of the readers."""

import numpy as np
import onnxruntime
import torch
from torch import nn

import bitwright as bw


class Similarity(nn.Module):
    """Returns embeddings, and their products with others, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        a, b = torch.exp(self.first(x)), torch.exp(self.second(x))
        return a, b @ a.t().to(x.device)


def test_a_result_that_is_moved_and_quantized_is_returned_in_float(tmp_path):
    torch.manual_seed(0)
    net, x = Similarity().eval(), torch.randn(6, 8)
    model = bw.calibrate(bw.prepare(net, x, "onnxruntime"), [0.5 * x], progress=False)
    path = bw.export(model, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(path)
    found = session.run(None, {session.get_inputs()[0].name: 3 * x.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, model(3 * x)[0].numpy(), rtol=1e-5)
    proof = bw.verify(model, path, [3 * x], latency=False, progress=False)
    assert proof.ok, proof.missed


class Shifted(nn.Module):
    """Adds a vector that is stored as integers."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return nn.functional.max_pool1d(nn.functional.gelu(self.linear(x)) + self.shift, 2)


def test_a_stored_vector_is_compared(tmp_path):
    torch.manual_seed(0)
    net, x = Shifted().eval(), torch.randn(2, 6, 8)
    model = bw.calibrate(bw.prepare(net, x, "onnxruntime"), [x], progress=False)
    proof = bw.verify(model, bw.export(model, tmp_path / "net.onnx"), [x], latency=False, progress=False)
    assert proof.ok, proof.missed
    stored = {t.name: t.values for t in proof.runtimes["onnxruntime"].tensors if t.kind == "weight"}
    assert 8 in stored.values()
