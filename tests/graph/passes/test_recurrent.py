"""Recurrent modules in a graph: float by default, and on request with quantizers for their parts."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.quantizer import quantizers


class Tagger(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.rnn = kind(8, 6, batch_first=True, **options)
        self.again = self.rnn  # under a second name
        self.head = nn.Linear(6 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, tokens):
        return self.head(self.rnn(self.words(tokens))[0])


def tokens(batch=2, length=5):
    return torch.randint(0, 11, (batch, length))


def prepared(net, switch=True):
    model = bw.prepare(net.eval(), tokens(), recipe={"schedules": {"split_recurrent": switch}}, debug=True)
    return model, [n for n in bw.ledger_of(model).notes if n.startswith("split_recurrent")]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {}), (nn.LSTM, {"bidirectional": True, "num_layers": 2, "dropout": 0.2}), (nn.GRU, {"num_layers": 2})],
)
def test_parts_are_quantized_at_every_length(kind, options):
    torch.manual_seed(0)
    net = Tagger(kind, **options)
    model, notes = prepared(net)
    assert notes == ["split_recurrent: rnn quantizes its inputs, states and weights"]
    assert model.rnn is model.again
    assert model.rnn.weight_ih_l0.shape == net.rnn.weight_ih_l0.shape
    others = [tokens(), tokens(3, 9), tokens(1, 1)]
    with torch.no_grad():
        for x in others:
            assert torch.equal(model(x), net(x))
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    assert {e.name: e.verdict.value for e in bw.ledger_of(model).entries}["rnn"] == "integer"
    bw.calibrate(model, others[:2])
    assert all(q.calibrated for q in quantizers(model).values())
    with torch.no_grad():
        for x in others:
            expected, got = net(x), model(x)
            assert not torch.equal(got, expected)
            assert float((got - expected).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())
    model.train()(tokens(4, 6)).pow(2).sum().backward()
    assert float(model.rnn.weight_hh_l0.grad.abs().max()) > 0


def test_fewer_bits_and_modules_to_keep():
    model, _ = prepared(Tagger(nn.LSTM), {"bits": 4})
    assert {q.spec.bits for n, q in quantizers(model).items() if n.startswith("rnn")} == {4}
    model, notes = prepared(Tagger(nn.LSTM), {"keep": ["rnn"]})
    assert notes == ["split_recurrent: not split: rnn, it is to be kept"]
    assert type(model.rnn) is nn.LSTM
    _, notes = prepared(Tagger(nn.LSTM), {"keep": ["rn"]})
    assert notes[1] == "split_recurrent: not kept: rn, no recurrent module has that name: did you mean 'rnn'?"


def test_float_by_default_and_where_there_is_no_quantized_form():
    model, notes = prepared(Tagger(nn.LSTM), False)
    assert notes == []
    assert type(model.rnn) is nn.LSTM
    _, notes = prepared(Tagger(nn.RNN))
    assert notes == ["split_recurrent: not split: rnn, there is no quantized RNN"]


def test_the_file_computes_what_the_simulation_does(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LSTM(8, 6, batch_first=True)).eval()
    x = torch.randn(2, 4, 6)
    model = bw.prepare(net, x, recipe={"schedules": {"split_recurrent": True}})
    bw.calibrate(model, [x])
    bw.export(model, tmp_path / "net.onnx", dynamic_shapes=False)
    proof = bw.verify(model, tmp_path / "net.onnx", [torch.randn(2, 4, 6)], latency=False)
    assert proof.ok, str(proof)
