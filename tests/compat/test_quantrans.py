"""QuanTransformer's layers: values by the papers' formulas, training, switches, the registry and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.compat import quantrans
from bitwright.compat.quantrans import QUANLAYERS, Qmodes, build_quanlayer
from bitwright.compat.quantrans.quantops import builder
from bitwright.errors import CalibrationError, ConfigError, UnknownNameError
from bitwright.methods import parameter_groups
from bitwright.methods.apot import additive_powers
from bitwright.quantizer import quantizers

LEARNED = {
    "LSQConv2d": ({"scale"}, {"scale"}),
    "LSQLinear": ({"scale"}, {"scale"}),
    "LSQPlusConv2d": ({"scale"}, {"scale", "offset"}),
    "LSQPlusLinear": ({"scale"}, {"scale", "offset"}),
    "LSQDPlusConv2d": ({"scale"}, {"scale", "offset"}),
    "ABQATConv2d": ({"scale"}, {"scale", "offset"}),
    "DSQConv": ({"upper", "lower", "alpha"}, {"upper", "lower", "alpha"}),
    "DSQConvV2": ({"upper", "lower", "alpha"}, {"upper", "lower", "alpha"}),
    "DSQLinear": ({"upper", "lower", "alpha"}, {"upper", "lower", "alpha"}),
    "DRFConv": (set(), set()),
    "DRFLinear": (set(), set()),
    "APOTQuantConv2d": ({"alpha"}, {"alpha"}),
    "APOTQuantLinear": ({"alpha"}, {"alpha"}),
    "EightBitQuantConv": (set(), set()),
    "EightBitQuantLinear": (set(), set()),
}
ALL = list(LEARNED)


def geometry(name):
    if "Conv" in name:
        return {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "padding": 1, "stride": 2, "bias": True}
    return {"in_features": 6, "out_features": 5}


def inputs(name):
    return torch.rand(4, 3, 8, 8) * 1.5 if "Conv" in name else torch.rand(16, 6) * 1.5


def make(name, **options):
    return build_quanlayer({"type": name, **geometry(name), **options})


def operate(layer, x, weight):
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


# What the papers (and, for eight bits, the earlier toolkit) make of a tensor, by the letter.


def lsq(v, bits, signed):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    step = 2 * v.abs().mean() / high**0.5
    return (v / step).clamp(low, high).round() * step


def lsq_plus_weight(v, bits):
    spread = 3 * v.std(correction=0)
    step = torch.maximum((v.mean() - spread).abs(), (v.mean() + spread).abs()) / 2 ** (bits - 1)
    return (v / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step


def affine(v, bits, low, high):
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = (high - low) / (2**bits - 1)
    zero = (-low / step).round()
    return ((v / step).round() + zero).clamp(0, 2**bits - 1).sub(zero) * step


def lsq_plus_input(v, bits):
    spread = 3 * v.std(correction=0)
    return affine(v, bits, (v.mean() - spread).maximum(v.min()), (v.mean() + spread).minimum(v.max()))


def min_max(v, bits):
    return affine(v, bits, v.min(), v.max())


def dorefa_weight(v, bits):
    t = v.tanh() / v.tanh().abs().max()
    top = 2 ** (bits - 1) - 1
    return (t * top).round() / top


def dorefa_input(v, bits):
    return (v.clamp(0, 1) * (2**bits - 1)).round() / (2**bits - 1)


def apot(v, bits, largest):
    levels = (additive_powers(bits) / additive_powers(bits).max()).float()
    nearest = levels[((v / largest).abs().clamp(max=1)[..., None] - levels).abs().argmin(-1)]
    return nearest * v.sign() * largest


def apot_weight(v, bits):
    return apot((v - v.mean()) / (v.std() + 1e-5), bits - 1, 3.0)


def eight(v, bits):
    top = v.abs().max()
    return (127 * v / top).round() / 127 * top


REFERENCE = {
    "LSQ": (lambda v, b: lsq(v, b, True), lambda v, b: lsq(v, b, False)),
    "LSQPlus": (lsq_plus_weight, lsq_plus_input),
    "LSQDPlus": (lsq_plus_weight, lsq_plus_input),
    "ABQAT": (lsq_plus_weight, lsq_plus_input),
    "DSQ": (min_max, min_max),
    "DRF": (dorefa_weight, dorefa_input),
    "APOTQuant": (apot_weight, lambda v, b: apot(v, b, v.max())),
    "EightBitQuant": (eight, eight),
}


def reference(name):
    return REFERENCE[name.split("Conv")[0].removesuffix("Linear")]


@pytest.mark.parametrize("name", ALL)
def test_without_bSetQ_it_is_the_float_layer(name):
    layer, x = make(name, bSetQ=False), inputs(name)
    assert torch.equal(layer(x), operate(layer, x, layer.weight))
    assert isinstance(layer, nn.Conv2d if "Conv" in name else nn.Linear)
    layer.bSetQ = True
    assert not torch.equal(layer(x), operate(layer, x, layer.weight))
    layer.bSetQ = False
    assert torch.equal(layer(x), operate(layer, x, layer.weight))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_first_batch_by_the_papers_formula(name, training):
    bits = {} if name.startswith("Eight") else {"num_bit_w": 4, "nbits_a": 3}
    layer, x = make(name, quant_activation=True, debug=True, **bits).train(training), inputs(name)
    out = layer(x)
    of_weight, of_input = reference(name)
    weight, data = of_weight(layer.weight.detach(), 4), of_input(x, 3)
    for got, want in ((layer.Qweight, weight), (layer.Qactivation, data)):
        step = want.abs().max() / 7
        # A value half way between two steps may fall to either side.
        assert ((got - want).abs() > 1e-5).float().mean() < 0.02
        assert (got - want).abs().max() <= step * 1.1
        assert len(got.unique()) <= 256
    assert torch.allclose(out, operate(layer, layer.Qactivation, layer.Qweight), atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_the_weight_and_all_that_is_learned(name):
    layer, x = make(name, quant_activation=True), inputs(name).requires_grad_()
    learned = [{n for n, _ in q.method.named_parameters()} for q in (layer.weight_quantizer, layer.input_quantizer)]
    assert tuple(learned) == LEARNED[name]
    layer(x)
    (layer(x * 1.5 - 0.2) * torch.randn(())).square().sum().backward()
    assert x.grad.abs().sum() > 0
    for parameter in layer.parameters():
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_made_before_the_first_batch_trains_it(name):
    layer, x = make(name, quant_activation=True), inputs(name)
    start = {n: p.detach().clone() for n, p in layer.named_parameters()}
    optimizer = torch.optim.Adam(parameter_groups(layer, lr=0.01))
    with torch.no_grad():
        target = operate(layer, x, torch.randn_like(layer.weight) * 0.3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in layer.parameters()}
    assert all(not torch.equal(p, start[n]) for n, p in layer.named_parameters())


@pytest.mark.parametrize("name", ALL)
def test_states_load_float_fresh_and_trained(name):
    layer, x = make(name), inputs(name)
    layer.load_state_dict((nn.Conv2d(3, 4, 3) if "Conv" in name else nn.Linear(6, 5)).state_dict())
    layer(x).sum().backward()
    with torch.no_grad():
        for p in layer.parameters():
            p.sub_(0.01 * torch.sign(p))
    for fresh in (make(name), make(name, bSetQ=False)):
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(fresh.eval()(x), layer.eval()(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("name", ["LSQConv2d", "LSQPlusConv2d", "DSQConv", "EightBitQuantLinear"])
def test_one_scale_per_kernel(name):
    layer = make(name, q_mode=Qmodes.kernel_wise)
    layer(inputs(name)).sum().backward()
    channels = layer.weight.shape[0]
    assert layer.weight_quantizer.scale.shape == (channels,)
    for q in (layer.weight_quantizer,):
        assert all(p.shape == (channels,) and p.grad.shape == (channels,) for p in q.method.parameters())


def test_switches():
    x = torch.randn(4, 3, 8, 8)
    layer = make("LSQConv2d", num_bit_a=32, debug=True)
    layer(x)
    assert torch.equal(layer.Qactivation, x)
    assert not torch.equal(layer.Qweight, layer.weight)
    layer = make("LSQConv2d", num_bit_w=32, quant_activation=False)
    assert torch.equal(layer(x), operate(layer, x, layer.weight))
    signed, unsigned = (make("LSQConv2d", signed=s, debug=True) for s in (True, False))
    signed(x), unsigned(x)
    assert signed.Qactivation.min() < 0
    assert unsigned.Qactivation.min() == 0
    assert (layer.nbits_w, layer.num_bit_a, layer.quant_activation) == (32, 4, False)
    eight_bits = make("DRFConv", num_bit_a=8, debug=True)
    eight_bits(x)
    assert torch.allclose(eight_bits.Qactivation, x, atol=float(x.max() - x.min()) / 255)


def test_eight_bits_follow_the_weight_in_training_only():
    layer, x = make("EightBitQuantLinear"), inputs("EightBitQuantLinear")
    layer(x)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert torch.allclose(layer(x), F.linear(x, eight(layer.weight, 8), layer.bias), atol=1e-5)
    scale = layer.eval().weight_quantizer.scale.clone()
    with torch.no_grad():
        layer.weight.mul_(3)
    layer(x)
    assert torch.equal(layer.weight_quantizer.scale, scale)


@pytest.mark.parametrize(("method", "observer"), [(1, "LSQPlusObserver"), (2, "LSQObserver"), (3, "MSEObserver")])
def test_initialisations_of_lsqd_plus(method, observer):
    layer = make("LSQDPlusConv2d", init_method_w=method, init_method_a=method, add_offset_w=True, momentum=0.1)
    assert [q.observer_name for q in quantizers(layer).values()] == [observer] * 2
    layer(inputs("Conv")).sum().backward()
    assert layer.weight_quantizer.method.offset.grad is not None


def test_from_float_keeps_what_the_layer_is():
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect")
    layer = quantrans.DSQConv.from_float(conv, num_bit_w=3)
    assert layer.weight is conv.weight
    assert (layer.padding_mode, layer.num_bit_w, layer.num_bit_a) == ("reflect", 3, 8)
    assert layer(torch.randn(1, 3, 8, 8)).shape == (1, 4, 4, 4)
    with pytest.raises(ConfigError, match=r"DSQConv.from_float takes stride from the float layer: leave it out"):
        quantrans.DSQConv.from_float(conv, stride=1)


def test_calibrating_a_model_of_such_layers():
    layers = (make("LSQConv2d"), nn.ReLU(), make("DSQConv", in_channels=4, quant_activation=False), nn.Flatten())
    model = nn.Sequential(*layers).eval()
    batches = [torch.rand(4, 3, 8, 8) * i for i in (1, 2, 3)]
    qmodel = bw.calibrate(bw.prepare(model, batches[0]), batches)
    found = quantizers(qmodel)
    step = 2 * torch.cat(batches).mean() / 15**0.5
    assert torch.allclose(found["0._input_quantizer"].scale, step, rtol=1e-5)
    assert not found["2._input_quantizer"].calibrated
    assert torch.allclose(found["2._weight_quantizer"].range()[0], model[2].weight.min(), atol=2e-3)


def test_the_seeds_own_layer():
    ours = QUANLAYERS.get("DSQConvV2")
    try:

        @builder.QUANLAYERS.register_module()
        class DSQConvV2(nn.Conv2d):
            def __init__(self, *args, num_bit_w=8, num_bit_a=8, bSetQ=True, **kwargs):
                super().__init__(*args, **kwargs)
                self.num_bit_w, self.bSetQ = num_bit_w, bSetQ

            def quantize_(self, x):
                step = x.detach().abs().max() / (2 ** (self.num_bit_w - 1) - 1)
                return x + (torch.round(x / step) * step - x).detach()

            def forward(self, x):
                weight = self.quantize_(self.weight) if self.bSetQ else self.weight
                return F.conv2d(x, weight, self.bias)

        cfg = {"type": "DSQConvV2", "num_bit_w": 3, "num_bit_a": 3, "bSetQ": True}
        layer = build_quanlayer({**cfg, "in_channels": 3, "out_channels": 4, "kernel_size": 3})
        assert type(layer) is DSQConvV2
        assert cfg["type"] == "DSQConvV2"
        assert len(layer.quantize_(layer.weight).unique()) <= 7
        assert layer(torch.randn(1, 3, 5, 5)).shape == (1, 4, 3, 3)

        class Other(nn.Conv2d):
            pass

        with pytest.raises(ConfigError, match=r"quantized layer 'DSQConvV2' is registered twice"):
            QUANLAYERS.register_module(name="DSQConvV2")(Other)
        assert QUANLAYERS.register_module(name="DSQConvV2", force=True, module=Other) is Other
        assert QUANLAYERS.get("DSQConvV2") is Other
        with pytest.raises(ConfigError, match=r"Other has no argument 'num_bit_w'"):
            build_quanlayer({**cfg, "in_channels": 3, "out_channels": 4, "kernel_size": 3})
    finally:
        QUANLAYERS.unregister("DSQConvV2")
    assert QUANLAYERS.get("DSQConvV2") is ours is quantrans.DSQConvV2


def test_the_registry_lists_what_there_is():
    assert QUANLAYERS.names() == sorted(ALL)
    assert QUANLAYERS.names("DSQ*") == ["DSQConv", "DSQConvV2", "DSQLinear"]
    assert set(ALL) <= set(vars(quantrans))
    assert build_quanlayer({"type": nn.Linear, "in_features": 2}, {"out_features": 3}).out_features == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LSQConv2d", {"num_bits_w": 4}, r"LSQConv2d has no argument 'num_bits_w': did you mean 'num_bit_w'"),
        ("LSQLinear", {"out_feature": 4}, r"LSQLinear has no argument 'out_feature': did you mean 'out_features'"),
        ("DRFConv", {"signed": True}, r"DRFConv has no argument 'signed'"),
        ("EightBitQuantConv", {"num_bit_w": 4}, r"EightBitQuantConv has no argument 'num_bit_w'"),
        ("LSQConv2d", {"num_bit_w": 4, "nbits_w": 5}, r"LSQConv2d is given two values of num_bit_w: 4 and 5"),
        ("LSQConv2d", {"num_bit_a": 1}, r"num_bit_a of LSQConv2d must be from 2 to 16, or 32 for float, not 1"),
        ("LSQConv2d", {"bSetQ": "yes"}, r"the option bSetQ of LSQConv2d must be True or False, not 'yes'"),
        ("LSQConv2d", {"q_mode": 2}, r"q_mode of LSQConv2d must be Qmodes.layer_wise or Qmodes.kernel_wise, not 2"),
        ("DSQConv", {"bias_quant": True}, r"DSQConv supports bias_quant=False only, not True: leave it out"),
        (
            "LSQDPlusConv2d",
            {"init_method_a": 4},
            r"init_method_a of LSQDPlusConv2d must be 1 \(LSQ\+\), 2 \(LSQ\) or 3",
        ),
    ],
)
def test_arguments_that_cannot_be(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_names_and_data_that_cannot_be():
    with pytest.raises(UnknownNameError, match=r"unknown quantized layer 'LSQConv': did you mean 'LSQConv2d'"):
        build_quanlayer({"type": "LSQConv"})
    with pytest.raises(ConfigError, match=r"needs a dict with the key 'type', not \{'num_bit_w': 3\}"):
        build_quanlayer({"num_bit_w": 3})
    with pytest.raises(ConfigError, match=r"derived from nn.Module, not <function"):
        QUANLAYERS.register_module()(make)
    with pytest.raises(ConfigError, match=r"write register_module\(\), with brackets"):
        QUANLAYERS.register_module(nn.Linear)
    layer, x = make("LSQLinear"), inputs("LSQLinear")
    with pytest.raises(CalibrationError, match="NaN or infinity was seen"):
        layer(x * float("nan"))
    assert layer(x).isfinite().all()
    assert layer(x[:0]).shape == (0, 5)
