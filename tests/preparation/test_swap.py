"""What replaces layers and functions."""

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.nn import QuantConv2d, QuantFunction, QuantLinear
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import register_qmodule, unregister_qmodule
from bitwright.preparation import Verdict
from bitwright.quantizer import Mode, quantizers
from tests.preparation.nets import Small, image, specs, verdicts


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.bias = nn.Parameter(torch.randn(4))
        self.matrix = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.kernel, self.bias, padding=1))
        return F.linear(x.mean((2, 3)), weight=self.matrix)


def test_functions_with_parameters_get_weight_quantizers():
    net = Functional().eval()
    model = bw.prepare(net, image())
    conv = model.get_submodule("bitwright.functions.conv2d")
    linear = model.get_submodule("bitwright.functions.linear")
    assert isinstance(conv, QuantFunction)
    assert str(conv).startswith("QuantFunction(\n  conv2d")
    assert (conv.weight_quantizer.label, linear.weight_quantizer.label) == ("conv2d.weight", "linear.weight")
    bw.calibrate(model, [image()])
    reach = net.kernel.detach().abs().amax((1, 2, 3)) / conv.weight_quantizer.spec.qmax
    assert torch.allclose(conv.weight_quantizer.scale, reach)
    assert set(net.state_dict()) <= set(model.state_dict())
    x = image()
    assert float((model(x) - net(x)).detach().pow(2).mean()) < 0.01 * float(net(x).detach().pow(2).mean())
    assert verdicts(model)["conv2d"] is verdicts(model)["linear"] is Verdict.INTEGER


def test_swapped_layers_keep_what_they_are():
    net = Small()
    net.fc.weight.requires_grad_(False)
    net.other.note = "mine"
    model = bw.prepare(net, image())
    assert type(model.fc) is QuantLinear
    assert type(model.other) is QuantConv2d
    assert isinstance(model.other, nn.Conv2d)
    assert not model.fc.weight.requires_grad
    assert model.other.note == "mine"
    assert model.other.kernel_size == (1, 1)
    assert list(dict(model.named_parameters())) == list(dict(net.named_parameters()))
    assert [n for n, _ in net.named_modules()] == [
        n for n, m in model.named_modules() if "quantizer" not in n and n != "bitwright"
    ]
    assert {q.mode for q in quantizers(model).values()} == {Mode.OFF}
    assert not any(m.training for m in model.modules())


def test_a_users_module_keeps_its_float_weight_on_request():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, 1, 1))

        def forward(self, x):
            return x * self.weight

    @register_qmodule(sources=[Gain])
    class QGain(QuantOpr):
        def __init__(self, org_module):
            super().__init__()
            self.weight = org_module.weight

        def forward(self, x):
            return self.input_quantizer(x) * self.weight_quantizer(self.weight)

    try:
        both = bw.prepare(nn.Sequential(Gain()), image())
        assert specs(both)["0"][:2] == ("int7 symmetric narrow channel:0", "uint8 affine tensor")
        inputs = bw.prepare(nn.Sequential(Gain()), image(), weight="float")
        assert type(inputs.get_submodule("0")) is Gain
        assert specs(inputs)["0"][:2] == ("", "uint8 affine tensor")
        weights = bw.prepare(nn.Sequential(Gain()), image(), activation="float")
        assert specs(weights)["0"][1:] == ("", "")
    finally:
        unregister_qmodule(QGain)
