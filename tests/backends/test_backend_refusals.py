"""What a backend cannot do is refused, and nothing is changed."""

import copy

import pytest
import torch

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.quantizer import quantizers
from tests.backends.probe import images, prepared, probe


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("tensorrt", {"activation": "uint8"}, "tensorrt has no activations in uint8; it has int8"),
        ("tensorrt", {"recipe": "W4A4"}, "the recipe: tensorrt has no activations in int4; it has int8"),
        ("snpe", {"weight": "uint8 channel:0"}, "snpe has no scales per channel for weights .* it has them per tensor"),
        ("snpe", {"weight": "uint8 symmetric"}, "snpe needs affine weights, not 'uint8 symmetric tensor'"),
        ("vitis", {"weight": "int8"}, "vitis needs scales that are powers of two"),
        ("stpu", {"activation": "int8 affine"}, "stpu needs symmetric activations, not 'int8 affine tensor'"),
        ("stpu", {"weight": "int8 symmetric"}, "stpu has no weights of -128 .* lacks the word 'narrow'"),
        ("nnie", {"weight": "int4"}, "nnie has no weights in int4; it has int8"),
        ("pplcuda", {"recipe": "W4A8"}, "pplcuda has no weights in uint4; it has uint8"),
        ("pplw8a16", {"activation": "uint8"}, "pplw8a16 has no activations in uint8; it has uint16"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_and_the_model_is_untouched(name, more, message):
    net = probe().train()
    net.fc.eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    with pytest.raises(ConfigError, match=message):
        bw.prepare(net, images(), name, **more)
    with pytest.raises(UnknownNameError, match="the rule 'conv4' matches no layer: did you mean 'conv3'"):
        bw.prepare(net, images(), name, skip=["conv4"])
    assert [m.training for m in net.modules()] == modes
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert {type(m).__module__.partition(".")[0] for m in net.modules()} <= {"torch", "tests"}
    x = images()
    with torch.no_grad():
        assert torch.equal(net.eval()(x), probe()(x))


def test_two_prepares_do_not_influence_each_other():
    plain = [str(q) for q in quantizers(prepared("tensorrt")).values()]
    special = {
        "activation": {"observer": "EMAMinMaxObserver", "observer_options": {"ema_ratio": 0.5}},
        "weight": {"spec": "int4 narrow channel:0", "method": "DSQFakeQuantize"},
        "rules": [{"match": "conv3", "skip": True}],
    }
    net = probe()
    first = bw.prepare(net, images(), "tensorrt", recipe=special)
    second = bw.prepare(net, images(), "tensorrt")
    assert [str(q) for q in quantizers(second).values()] == plain
    assert first.fc.input_quantizer.observer.ema_ratio == 0.5
    assert second.fc.input_quantizer.observer.ema_ratio == 0.9
    bw.calibrate(first, [images()], progress=False)
    assert not any(q.calibrated for q in quantizers(second).values())
    with torch.no_grad():
        first.fc.weight.add_(1.0)
        assert torch.equal(second(images()), net(images()))
