"""The samples of the two guides to custom modules, as printed, with only the import root changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import pooling

import bitwright as bw
from bitwright import nn as quant_nn
from bitwright.errors import ConfigError
from bitwright.nn import QuantOpr, register_qmodule, unregister_qmodule
from bitwright.nn.modules import _utils
from bitwright.preparation import Verdict
from bitwright.quantizer import QuantDescriptor, TensorQuantizer, quantizers

# fmt: off
# ruff: noqa: E501, UP008, D415


def seed_000():
    @register_qmodule(sources=[nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d]) #sources are operators to be replaced. All operators in model should be registered as qmodule for easier management.
    class QAdaptiveAvgPool2d(QuantOpr): #Name of QModule
        def __init__(self, org_module, config=None): #org_module is the source operator.
            super().__init__()
            if isinstance(org_module, nn.Module): # for nn.Module operators, their attributes can be accessed directly.
                self.output_size = org_module.output_size
            else: # for functional operators like F.conv, torch.mul, operator.add, their attributes are saved in args. you can print args out for further informations.
                self.output_size = org_module.args[1]
            self._repr_info = "Q" + org_module.__repr__()

        def forward(self, x_in, *args): # for functional operators with extra args, *args must be announced here.
            x_in = self.input_quantizer(x_in)
            out = F.adaptive_avg_pool2d(x_in, self.output_size) # Operators MUST be written as functions to avoid repeated matching
            return out

    return QAdaptiveAvgPool2d


class QuantMaxPool2d(pooling.MaxPool2d, _utils.QuantInputMixin):
    """Quantized 2D maxpool"""
    def __init__(self, kernel_size, stride=None, padding=0, dilation=1,
                return_indices=False, ceil_mode=False, **kwargs):
        super(QuantMaxPool2d, self).__init__(kernel_size, stride, padding, dilation,
                                            return_indices, ceil_mode)
        quant_desc_input = _utils.pop_quant_desc_in_kwargs(self.__class__, input_only=True, **kwargs)
        self.init_quantizer(quant_desc_input)

    def forward(self, input):
        quant_input = self._input_quantizer(input)
        return super(QuantMaxPool2d, self).forward(quant_input)

    @property
    def input_quantizer(self):
        return self._input_quantizer


class QuantLinear(nn.Linear, _utils.QuantMixin):

    def __init__(self, in_features, out_features, bias=True, **kwargs):
        super(QuantLinear, self).__init__(in_features, out_features, bias)
        quant_desc_input, quant_desc_weight = _utils.pop_quant_desc_in_kwargs(self.__class__, **kwargs)

        self.init_quantizer(quant_desc_input, quant_desc_weight)

    def forward(self, input):
        quant_input = self._input_quantizer(input)
        quant_weight = self._weight_quantizer(self.weight)

        output = F.linear(quant_input, quant_weight, bias=self.bias)

        return output

    @property
    def input_quantizer(self):
        return self._input_quantizer

    @property
    def weight_quantizer(self):
        return self._weight_quantizer

# fmt: on


@pytest.fixture
def q_pool():
    cls = seed_000()
    yield cls
    unregister_qmodule(cls)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.pool(F.relu(self.conv(x))), (2, 2))
        return self.fc(x.flatten(1))


def test_seed_000_in_a_graph(q_pool, tmp_path):
    model, x = Pools().eval(), torch.randn(4, 3, 9, 9)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert isinstance(prepared.pool, q_pool)
    assert isinstance(prepared.bitwright.functions.adaptive_avg_pool2d, q_pool)
    assert prepared.bitwright.functions.adaptive_avg_pool2d.output_size == (2, 2)
    assert repr(prepared.pool) == "QAdaptiveAvgPool2d(QAdaptiveAvgPool2d(output_size=3))"
    verdicts = {e.name: e.verdict for e in bw.ledger_of(prepared).entries}
    assert verdicts["pool"] is verdicts["adaptive_avg_pool2d"] is Verdict.INTEGER
    bw.calibrate(prepared, [x])
    assert float((prepared(x) - model(x)).detach().abs().max()) < 0.05
    path = bw.export(prepared, tmp_path / "pools.onnx")
    got = bw.run_file(path)(x)
    assert torch.allclose(got, prepared(x), atol=0.01)


def test_seed_000_twice_names_both(q_pool):
    with pytest.raises(
        ConfigError, match=r"AdaptiveAvgPool2d is registered twice: by .*QAdaptiveAvgPool2d and by .*QAd"
    ):
        seed_000()


def test_seed_001_pool():
    pool = QuantMaxPool2d(2, stride=1, ceil_mode=True)
    x = torch.randn(1, 2, 5, 5)
    step = x.abs().max() / 127
    assert torch.allclose(pool(x), F.max_pool2d((x / step).round() * step, 2, 1, ceil_mode=True), atol=1e-6)
    pool.input_quantizer.disable()
    assert torch.equal(pool(x), F.max_pool2d(x, 2, 1, ceil_mode=True))
    with pytest.raises(TypeError, match="QuantMaxPool2d has no argument 'quant_desc_weight'"):
        QuantMaxPool2d(2, quant_desc_weight=QuantDescriptor())


def test_seed_001_linear():
    layer = QuantLinear(6, 4, quant_desc_input=QuantDescriptor(num_bits=4))
    assert layer.input_quantizer.num_bits == 4
    assert layer.weight_quantizer.axis == 0
    x = torch.randn(3, 6)
    coarse = (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().max()
    layer.input_quantizer.disable()
    layer.weight_quantizer.disable()
    assert 0 < float(coarse) < 1
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_seed_001_directly_in_the_graph():
    test_input = torch.randn(1, 5, 5, 5, dtype=torch.double)

    quantizer = TensorQuantizer(quant_nn.QuantLinear.default_quant_desc_input)

    quant_input = quantizer(test_input)

    out = F.adaptive_avg_pool2d(quant_input, 3)
    step = test_input.abs().max() / 127
    assert out.dtype == torch.double
    assert torch.allclose(quant_input, (test_input / step).round() * step, atol=1e-6)


class Mixed(nn.Module):
    """All three ways of seed 001, and float layers, in one model."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.pool = QuantMaxPool2d(2)
        self.by_hand = TensorQuantizer(QuantDescriptor())
        # 7 bits: x86 CPUs without VNNI saturate with 8.
        self.fc = QuantLinear(4 * 9, 6, quant_desc_weight=QuantDescriptor(num_bits=7, axis=0))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.pool(F.relu(self.conv(x)))
        x = self.fc(self.by_hand(F.adaptive_avg_pool2d(x, 3)).flatten(1))
        return self.head(x)


def test_all_ways_in_one_prepared_model(tmp_path):
    model, x = Mixed().eval(), torch.randn(4, 3, 12, 12)
    for quantizer in quantizers(model).values():
        quantizer.off()
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    reasons = {e.name: (e.verdict, e.reason) for e in bw.ledger_of(prepared).entries}
    assert reasons["pool"] == (Verdict.INTEGER, "has its own quantizers")
    assert reasons["by_hand"] == (Verdict.INTEGER, "a quantizer placed by hand")
    assert reasons["fc"] == (Verdict.INTEGER, "has its own quantizers")
    bw.calibrate(prepared, [x])
    for name in ("pool._input_quantizer", "by_hand", "fc._weight_quantizer", "fc._input_quantizer"):
        assert prepared.get_submodule(name).amax is not None, name
    assert 0 < float((prepared(x) - model(x)).detach().abs().max()) < 0.1
    prepared(x).sum().backward()
    assert float(prepared.fc.weight.grad.abs().max()) > 0
    path = bw.export(prepared, tmp_path / "mixed.onnx")
    got = bw.run_file(path)(x)
    assert torch.allclose(got, prepared(x), atol=0.02)
