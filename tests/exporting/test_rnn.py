"""Recurrent layers in files: one operator for sequences of every length, as torch computes it."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw


class Tagger(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 6, **settings)
        self.head = nn.Linear(12 if self.rnn.bidirectional else 6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, last = self.rnn(x)
        return self.head(rows), last


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_first": True},
        {"nonlinearity": "relu", "num_layers": 3, "bias": False},
        {"bidirectional": True, "num_layers": 2, "batch_first": True},
    ],
)
def test_an_rnn_takes_other_lengths(settings: dict[str, object], runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    net, x = Tagger(**settings).eval(), torch.randn(2, 5, 4)
    model = bw.calibrate(bw.prepare(net, x, backend=runtime), [x])
    file = bw.export(model, tmp_path / "net.onnx", quantized=False)
    assert sum(node.op_type == "RNN" for node in onnx.load(str(file)).graph.node) == net.rnn.num_layers
    other = torch.randn(3, 9, 4)
    with torch.no_grad():
        torch.testing.assert_close(bw.run_file(file, runtime)(other), net(other))
    assert bw.verify(model, bw.export(model, file), [x, other], runtimes=[runtime], latency=False).ok


class Attending(nn.Module):
    """Reads the length of what a recurrent layer gives."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.attention = kind(4, 6, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.layer(x)
        places = torch.arange(rows.shape[1]).view(-1, 1) / 10
        return self.attention(rows, rows, rows)[0] + places


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_length_stays_free_after_a_recurrent_layer(kind: type[nn.RNNBase], runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    net, x = Attending(kind).eval(), torch.randn(2, 5, 4)
    model = bw.calibrate(bw.prepare(net, x, backend=runtime), [x])
    file, other = bw.export(model, tmp_path / "net.onnx", quantized=False), torch.randn(3, 10, 4)
    with torch.no_grad():
        torch.testing.assert_close(bw.run_file(file, runtime)(other), net(other))
    assert bw.verify(model, bw.export(model, file), [x, other], runtimes=[runtime], latency=False).ok
