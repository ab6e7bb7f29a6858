"""Modules swapped without a graph, and torch.nn replaced before a model is built."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright import nn as qnn
from bitwright import quant_modules
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.nn import QuantOpr, register_qmodule, unregister_qmodule
from bitwright.preparation import Verdict
from bitwright.quantizer import Mode, QuantDescriptor, quantizers


class Untraceable(nn.Module):
    """Its path through the model depends on the data."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        self.tied = self.parts[0]

    def forward(self, x):
        x = self.act(self.conv(x))
        while float(x.abs().max()) > 4:
            x = x / 2
        x = self.pool(x).flatten(1)
        return self.parts[1](self.tied(self.parts[0](x)))


def test_descriptors_are_the_default():
    model, x = Untraceable().eval(), torch.randn(5, 3, 6, 6)
    swapped = bw.swap_modules(model)
    assert torch.equal(swapped(x), model(x))
    kinds = [type(m) for m in (swapped.conv, swapped.act, swapped.pool, swapped.tied)]
    assert kinds == [qnn.QuantConv2d, nn.ReLU, qnn.QuantAdaptiveAvgPool2d, qnn.QuantLinear]
    assert swapped.tied is swapped.parts[0]
    assert type(model.conv) is nn.Conv2d
    assert {e.name for e in bw.ledger_of(swapped).entries} == {"conv", "pool", "parts.0", "parts.1"}
    bw.calibrate(swapped, [x])
    assert {q.mode for q in quantizers(swapped).values()} == {Mode.QUANTIZE}
    with torch.no_grad():
        assert 0 < float((swapped(x) - model(x)).abs().max()) < 0.05
    fresh = bw.swap_modules(model)
    fresh.load_state_dict(swapped.state_dict())
    assert torch.equal(fresh(x), swapped(x))


def test_a_backend():
    model, x = Untraceable().eval(), torch.randn(5, 3, 6, 6)
    swapped = bw.swap_modules(model, backend="onnxruntime")
    assert torch.equal(swapped(x), model(x))
    assert str(swapped.conv.weight_quantizer.spec) == "int7 symmetric narrow channel:0"
    assert str(swapped.pool.input_quantizer.spec) == "uint8 affine tensor"
    entries = {e.name: e for e in bw.ledger_of(swapped).entries}
    assert (entries["conv"].operator, entries["conv"].verdict) == ("conv2d", Verdict.INTEGER)
    bw.calibrate(swapped, [x])
    with torch.no_grad():
        assert 0 < float((swapped(x) - model(x)).abs().max()) < 0.05


def test_include_exclude_and_inplace():
    model = Untraceable()
    swapped = bw.swap_modules(model, include=["act", "parts"], exclude="parts.1", inplace=True)
    assert swapped is model
    assert [type(m).__name__ for m in (model.conv, model.act, *model.parts)] == [
        *("Conv2d", "QuantReLU", "QuantLinear", "Linear")
    ]
    described = bw.swap_modules(Untraceable(), quant_desc_weight=QuantDescriptor(num_bits=4, axis=0))
    assert described.conv.weight_quantizer.num_bits == 4
    assert type(bw.swap_modules(nn.Linear(2, 2))) is qnn.QuantLinear


def test_a_users_operator_and_modules_of_many_kinds():
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    @register_qmodule(sources=[Twice])
    class QTwice(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()

        def forward(self, x):
            return self.input_quantizer(x) * 2

    try:
        swapped = bw.swap_modules(nn.Sequential(Twice(), qnn.QuantReLU()))
    finally:
        unregister_qmodule(QTwice)
    assert type(swapped[0]) is QTwice
    bw.calibrate(swapped, [torch.randn(3, 4)])
    x = torch.randn(3, 4)
    assert torch.allclose(swapped(x), (2 * x).relu(), atol=0.2)
    assert [e.reason for e in bw.ledger_of(swapped).entries] == ["", "has its own quantizers"]


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), torch.randn(2, 6, 4)),
        (lambda: nn.GRU(4, 5), torch.randn(6, 2, 4)),
    ],
)
def test_recurrent_layers(layer, x):
    model = layer().eval()
    swapped = bw.swap_modules(model)
    assert torch.equal(swapped(x)[0], model(x)[0])
    bw.calibrate(swapped, [x])
    with torch.no_grad():
        assert 0 < float((swapped(x)[0] - model(x)[0]).abs().max()) < 0.05
    swapped(x)[0].sum().backward()
    assert float(swapped.weight_ih_l0.grad.abs().max()) > 0


def test_a_transformer_layer_uses_its_swapped_modules():
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    swapped = bw.swap_modules(model)
    with torch.no_grad():
        assert torch.allclose(swapped(x), model(x), atol=1e-6)
        bw.calibrate(swapped, [x])
        assert swapped.linear1.input_quantizer.calibrated
        assert 1e-6 < float((swapped(x) - model(x)).abs().max()) < 0.2


@pytest.mark.parametrize("backend", [None, "onnxruntime"])
def test_export(backend, tmp_path):
    seven = {} if backend else {"quant_desc_weight": QuantDescriptor(num_bits=7, axis=0)}
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 2)),
    ).eval()
    x = torch.randn(4, 3, 10, 10)
    swapped = bw.swap_modules(model, backend=backend, example_inputs=x, **seven)
    bw.calibrate(swapped, [x])
    got = bw.run_file(bw.export(swapped, tmp_path / "swapped.onnx"))(x)
    with torch.no_grad():
        want = swapped(x)
    assert torch.allclose(got, want, atol=float(want.abs().max()) / 127)


def test_bad_input():
    model = Untraceable()
    with pytest.raises(UnknownNameError, match=r"no module is named 'parts.2': did you mean 'parts.1' or"):
        bw.swap_modules(model, exclude=["parts.2"])
    with pytest.raises(UnknownNameError, match="no module is named 'cnv': did you mean 'conv'"):
        bw.swap_modules(model, include="cnv")
    with pytest.raises(ConfigError, match="give a backend or descriptors, not both"):
        bw.swap_modules(model, backend="openvino", quant_desc_input=QuantDescriptor())
    with pytest.raises(UnknownNameError, match="unknown backend 'onnx'"):
        bw.swap_modules(model, backend="onnx")
    with pytest.raises(ConfigError, match="this model is prepared already"):
        bw.swap_modules(bw.swap_modules(model))


# --------------------------------------------------------------------------------------------- quant_modules


@pytest.fixture
def untouched():
    before = dict(vars(nn))
    yield
    assert dict(vars(nn)) == before


@pytest.mark.usefixtures("untouched")
def test_models_built_inside_are_quantized():
    with quant_modules.initialize():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.LSTM(3, 4), nn.Linear(2, 2))
    kinds = [type(m).__name__ for m in model]
    assert kinds == ["QuantConv2d", "ReLU", "QuantAvgPool2d", "QuantLSTM", "QuantLinear"]
    assert type(nn.Conv2d(3, 4, 3)).__name__ == "Conv2d"
    assert copy.deepcopy(model)[0].input_quantizer.num_bits == 8
    assert isinstance(model[0], nn.Conv2d)


@pytest.mark.usefixtures("untouched")
def test_lists_and_custom_classes():
    class MyReLU(nn.ReLU):
        pass

    class MyLinear(nn.Linear):
        pass

    quant_modules.initialize(["Linear", "Conv2d"], [(nn, "ReLU", MyReLU), (nn, "Linear", MyLinear)])
    try:
        made = [nn.Conv2d(1, 1, 1), nn.Conv1d(1, 1, 1), nn.ReLU(), nn.Linear(1, 1)]
    finally:
        quant_modules.deactivate()
    assert [type(m).__name__ for m in made] == ["Conv2d", "QuantConv1d", "MyReLU", "MyLinear"]
    quant_modules.deactivate()


@pytest.mark.usefixtures("untouched")
def test_restored_after_an_exception_and_never_twice():
    with pytest.raises(RuntimeError, match="while building"), quant_modules.initialize():
        raise RuntimeError("while building")
    with quant_modules.initialize(), pytest.raises(ConfigError, match="initialized already; deactivate"):
        quant_modules.initialize()
    with pytest.raises(UnknownNameError, match="no layer named 'Conv2D' would be replaced: did you mean 'Conv2d'"):
        quant_modules.initialize(["Conv2D"])
    with pytest.raises(UnknownNameError, match=r"torch\.nn has no 'Linea' to replace: did you mean"):
        quant_modules.initialize(custom_quant_modules=[(nn, "Linea", nn.Linear)])
    with quant_modules.initialize():
        assert nn.Linear is qnn.QuantLinear


@pytest.mark.usefixtures("untouched")
def test_a_model_built_inside_goes_through_graph_mode(tmp_path):
    with quant_modules.initialize():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.eval()
    for quantizer in quantizers(model).values():
        quantizer.off()
    x = torch.randn(4, 3, 6, 6)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    bw.calibrate(prepared, [x])
    with torch.no_grad():
        want = prepared(x)
        assert 0 < float((want - model(x)).abs().max()) < 0.05
    got = bw.run_file(bw.export(prepared, tmp_path / "built.onnx"))(x)
    assert torch.allclose(got, want, atol=0.02)
