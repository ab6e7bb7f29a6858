"""LSTMs on integer weights: in the simulation, in the file for onnxruntime, saved, trained, and left float."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.nn.dynamic_recurrent import DynamicLSTM
from bitwright.quantizer import quantizers
from tests.exporting.lstm_reference import dynamic_lstm


class Net(nn.Module):
    """An LSTM whose output and states are returned; ``given`` starts from states that are passed in."""

    def __init__(self, *, given=False, **options):
        super().__init__()
        self.given = given
        self.rnn = nn.LSTM(64, 72, **options)

    def forward(self, x, h=None, c=None):
        out, (h, c) = self.rnn(x, (h, c) if self.given else None)
        return out, h, c


def made(net, inputs, **wishes):
    model = bw.prepare(net.eval(), inputs, "onnxruntime", **wishes)
    return bw.calibrate(model, [inputs])


def example(net, batch=2, steps=5):
    rnn = net.rnn
    x = torch.randn((batch, steps, 64) if rnn.batch_first else (steps, batch, 64))
    if not net.given:
        return (x,)
    places = rnn.num_layers * (2 if rnn.bidirectional else 1)
    return x, torch.rand(places, batch, 72) - 0.5, torch.randn(places, batch, 72)


FORMS = [
    {},
    {"batch_first": True, "bias": False},
    {"batch_first": True, "bidirectional": True, "num_layers": 2},
    {"given": True, "num_layers": 2},
    {"given": True, "bidirectional": True},
]


@pytest.mark.parametrize("form", FORMS)
def test_the_file_gives_what_the_simulation_does_at_any_size(form, tmp_path):
    torch.manual_seed(0)
    net = Net(**form)
    model = made(net, example(net))
    file = bw.export(model, tmp_path / "net.onnx")
    runs = {node.op_type for node in onnx.load(file).graph.node}
    assert "DynamicQuantizeLSTM" in runs
    assert "LSTM" not in runs
    others = [example(net), example(net, 3, 11), example(net, 1, 1)]
    proof = bw.verify(model, file, others, runtimes=["onnxruntime"], latency=False)
    found = proof.runtimes["onnxruntime"]
    assert proof.ok, proof.missed
    assert found.largest == 0
    assert {o.kind for o in found.operators if o.integer} == {"lstm"}
    assert len([t for t in found.tensors if t.kind == "weight" and t.equal == 1.0]) == len(model.rnn.weight_names())
    run = bw.run_file(file)
    with torch.no_grad():
        for inputs in others:
            for ours, theirs, true in zip(model(*inputs), run(*inputs), net(*inputs), strict=True):
                assert float((ours - theirs).abs().max()) < 2e-6
                assert 0 < float((ours - true).abs().max()) < 0.05


def test_the_simulation_computes_in_integers():
    torch.manual_seed(0)
    net = Net(bidirectional=True)
    x = torch.randn(7, 3, 64)
    model = made(net, (x,))
    with torch.no_grad():
        out, h, c = model(x)
    integers = [q.integers(w).numpy() for q, w in weights(model.rnn)]
    scales = [q.qparams()[0].numpy() for q, _ in weights(model.rnn)]
    assert all(np.abs(i).max() == 63 for i in integers)
    for place, steps in enumerate((range(7), range(6, -1, -1))):
        biases = [b.detach().numpy() for b in net.rnn.all_weights[place][2:]]
        pair = slice(2 * place, 2 * place + 2)
        expected = dynamic_lstm(x.numpy(), integers[pair], scales[pair], biases[0] + biases[1], steps)
        for ours, theirs in zip((out[..., 72 * place :][..., :72], h[place], c[place]), expected, strict=True):
            assert np.abs(ours.numpy() - theirs).max() < 1e-6


def weights(rnn):
    return zip(rnn._weight_quantizers, rnn.stored_weights().values(), strict=True)


def test_float_parity_until_calibrated_and_saved_as_any_layer(tmp_path):
    torch.manual_seed(0)
    net = Net(num_layers=2).eval()
    x = torch.randn(4, 2, 64)
    model = bw.prepare(net, x, "onnxruntime")
    assert isinstance(model.rnn, DynamicLSTM)
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(x), net(x), strict=True))
    bw.calibrate(model, [x])
    assert not any(q.calibrated for q in model.rnn._input_quantizers)
    bw.save(model, tmp_path / "saved")
    again = bw.load(tmp_path / "saved", Net(num_layers=2))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(x), again(x), strict=True))
    model.train()(x)[0].pow(2).sum().backward()
    assert all(float(getattr(model.rnn, name).grad.abs().max()) > 0 for name in model.rnn.weight_names())


def test_what_users_ask_for():
    net, x = Net(), torch.randn(4, 2, 64)

    def entry(**wishes):
        model = bw.prepare(net.eval(), x, **wishes)
        return next(e for e in bw.ledger_of(model).entries if e.name == "rnn"), model

    found, model = entry(backend="onnxruntime")
    assert (found.verdict.value, found.weight) == ("integer", "int7 symmetric narrow channel:0")
    assert "found as it runs" in found.reason
    found, model = entry(backend="onnxruntime", skip=["rnn"])
    assert (found.verdict.value, found.reason) == ("float", "skipped by the rule 'rnn'")
    assert type(model.rnn) is nn.LSTM
    found, model = entry(backend="onnxruntime", recipe={"rules": [{"match": "rnn", "weight": "int4 narrow channel:0"}]})
    assert {q.spec.bits for q in model.rnn._weight_quantizers} == {4}
    assert entry(backend="openvino")[0].verdict.value == "float"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LSTM(64, 72, proj_size=8), "onnxruntime has no integer LSTM with projections"),
        (nn.LSTM(32, 32), "too small: onnxruntime computes it faster in float"),
        (nn.GRU(64, 72), "onnxruntime has no integer GRU"),
    ],
)
def test_what_stays_float_says_why(module, reason):
    model = bw.prepare(nn.Sequential(module).eval(), torch.randn(4, 2, module.input_size), "onnxruntime")
    (entry,) = [e for e in bw.ledger_of(model).entries if e.operator in ("LSTM", "GRU")]
    assert entry.verdict.value == "float"
    assert entry.reason.startswith(reason)


def test_a_disabled_quantizer_leaves_the_whole_lstm_float(tmp_path):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(4, 2, 64)
    model = nn.Sequential(nn.Linear(64, 64), net.rnn).eval()
    model = bw.calibrate(bw.prepare(model, x, "onnxruntime"), [x])
    next(q for n, q in quantizers(model).items() if "_weight_quantizers" in n).disable()
    file = bw.export(model, tmp_path / "net.onnx")
    assert "LSTM" in {node.op_type for node in onnx.load(file).graph.node}
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed


def test_the_float_twin_of_a_file_is_an_lstm_with_the_same_weights(tmp_path):
    torch.manual_seed(0)
    net, x = Net(bidirectional=True), torch.randn(4, 2, 64)
    model = made(net, (x,))
    file = bw.export(model, tmp_path / "net.onnx")
    plain = bw.run_file(file, quantized=False)
    with torch.no_grad():
        for quantizer, name in zip(model.rnn._weight_quantizers, model.rnn.weight_names(), strict=True):
            getattr(net.rnn, name).copy_(quantizer(getattr(net.rnn, name)))
        for theirs, expected in zip(plain(x), net(x), strict=True):
            assert float((theirs - expected).abs().max()) < 1e-6
