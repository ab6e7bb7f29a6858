"""Models with weights in few bits and activations in float are proven, and runtimes' defaults are told apart."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.exporting.formats.base import format_of
from bitwright.verification.runtimes import RUNTIMES


class Words(nn.Module):
    """A small encoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1))


def proven(tmp_path, weight, backend="onnxruntime"):
    torch.manual_seed(0)
    batches = [torch.randint(0, 30, (3, 6)) for _ in range(2)]
    model = bw.prepare(Words().eval(), batches[0], backend, weight=weight, activation="float")
    bw.calibrate(model, batches, progress=False)
    path = tmp_path / "net.onnx"
    bw.export(model, path)
    return model, path, batches, bw.verify(model, path, batches, latency=False, progress=False)


@pytest.mark.parametrize("weight", ["int8 narrow channel:0", "int4 symmetric channel:0"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_they_are_proven(tmp_path, weight, backend):
    _, path, batches, proof = proven(tmp_path, weight, backend)
    assert proof.ok, proof.missed
    assert set(proof.runtimes) == {"onnxruntime", "openvino"}
    for name, found in proof.runtimes.items():
        plain = RUNTIMES.get(name)()
        feeds = {"tokens": batches[0].numpy()}
        ours, others = (plain.open(format_of(path).read(path), as_is=as_is)(feeds) for as_is in (False, True))
        (a, b) = (next(iter(each.values())) for each in (ours, others))
        told = [note for note in found.notes if note.startswith("opened without")]
        assert bool(told) == bool(abs(a - b).max() > 1e-4 * abs(a).max())


def test_what_onnxruntime_rounds_by_default_is_noted(tmp_path):
    *_, proof = proven(tmp_path, "int8 narrow channel:0")
    (note,) = [n for n in proof.runtimes["onnxruntime"].notes if n.startswith("opened without")]
    assert "session.qdq_matmulnbits_accuracy_level=1" in note
    assert "it rounds the other factor of products with stored integers to 8 bits" in note
    assert "opened without" in str(proof)
