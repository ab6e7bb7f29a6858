"""Recurrent and attention layers as ONNX files: weights stored as integers, the runtime agrees."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bitwright as bw
from bitwright.errors import ExportError
from bitwright.quantizer import QuantDescriptor

SEVEN = QuantDescriptor(num_bits=7, axis=0)  # x86 CPUs without VNNI saturate with 8


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn, self.fc = getattr(nn, kind)(5, 6, **options), nn.LazyLinear(3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(5, 6)

    def forward(self, x):
        h, c = self.cell(x)
        return self.cell(x, (h, c))[0]


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        size = options.get("kdim", 8)
        self.key = nn.Linear(8, size)

    def forward(self, x):
        key = self.key(x)
        return self.attention(x, key, key, need_weights=False)[0]


def calibrated(model, x):
    model(x)
    swapped = bw.swap_modules(model.eval(), quant_desc_weight=SEVEN, example_inputs=x)
    return bw.calibrate(swapped, [x])


CASES = {
    "lstm": (lambda: Recurrent("LSTM", batch_first=True), (3, 4, 5)),
    "lstm, both ways, two layers": (
        lambda: Recurrent("LSTM", batch_first=True, num_layers=2, bidirectional=True),
        (3, 4, 5),
    ),
    "lstm, projected": (lambda: Recurrent("LSTM", batch_first=True, proj_size=4), (3, 4, 5)),
    "gru": (lambda: Recurrent("GRU", batch_first=True), (3, 4, 5)),
    "gru, both ways": (lambda: Recurrent("GRU", batch_first=True, bidirectional=True, bias=False), (3, 4, 5)),
    "cell": (Cell, (3, 5)),
    "attention": (Attention, (3, 4, 8)),
    "attention, other keys": (lambda: Attention(kdim=6, vdim=6), (3, 4, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_agrees(case, tmp_path):
    torch.manual_seed(0)
    make, shape = CASES[case]
    x = torch.randn(shape)
    model = calibrated(make(), x)
    path = bw.export(model, tmp_path / "model.onnx")
    run = bw.run_file(path)
    for batch in (x, torch.randn(5, *shape[1:])):
        assert torch.allclose(run(batch), model(batch), atol=1e-5)
    stored = {i.name: i for i in onnx.load(path).graph.initializer}
    weights = [i for i in stored.values() if len(i.dims) == 2 and "weight_hr" not in i.name]
    assert weights
    assert all(i.data_type == onnx.TensorProto.INT8 for i in weights), [i.name for i in weights]


def test_what_the_exporter_cannot_do_is_said(tmp_path):
    class Packed(Recurrent):
        def forward(self, x, lengths):
            packed, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))
            return self.fc(pad_packed_sequence(packed, batch_first=True)[0])

    inputs = (torch.randn(3, 4, 5), torch.tensor([4, 3, 1]))
    model = Packed("LSTM", batch_first=True).eval()
    model(*inputs)
    model = bw.calibrate(bw.swap_modules(model, quant_desc_weight=SEVEN, example_inputs=inputs), [inputs])
    with pytest.raises(ExportError, match="the exporter refused the model: "):
        bw.export(model, tmp_path / "packed.onnx")
    assert not (tmp_path / "packed.onnx").exists()
