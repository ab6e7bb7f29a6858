"""Checkpoints: ranges with the spec that gives them their meaning, and the way between float and prepared models."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer, quantizers

SHAPES = {"uint8": (3, 4), "int8 channel:0": (3, 4), "int4 group:2:1": (3, 4)}
X = torch.tensor([[-3.0, 0.31, 1.02], [0.5, -0.77, 0.25]])


def calibrated(spec="uint8", shape=(3, 4), **options):
    quantizer = TensorQuantizer(spec, **options)
    quantizer.observe()
    quantizer(torch.randn(shape))
    quantizer.compute_qparams()
    quantizer.quantize()
    return quantizer


def make(**fields):
    return TensorQuantizer(QuantDescriptor(**fields))


def same_state(one, other):
    return (
        torch.equal(one.scale, other.scale)
        and torch.equal(one.zero_point, other.zero_point)
        and one.scale.shape == other.scale.shape
        and one.mode is other.mode
        and one.enabled is other.enabled
    )


# ---------------------------------------------------------------------------------------------- by scale


@pytest.mark.parametrize("spec", SHAPES)
def test_calibrated_loads_into_fresh(spec):
    source, target = calibrated(spec, SHAPES[spec]), TensorQuantizer(spec)
    source.disable()
    result = target.load_state_dict(source.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert same_state(target, source)
    source.enable()
    target.enable()
    x = torch.randn(SHAPES[spec])
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("spec", SHAPES)
def test_fresh_loads_into_calibrated(spec):
    target = calibrated(spec, SHAPES[spec])
    target.load_state_dict(TensorQuantizer(spec).state_dict())
    assert not target.calibrated
    assert target.mode is Mode.OFF


def test_another_number_of_channels_loads():
    source, target = calibrated("int8 channel:0", (7, 2)), calibrated("int8 channel:0", (3, 2))
    target.load_state_dict(source.state_dict())
    assert same_state(target, source)


def test_loading_by_assignment():
    source, target = calibrated("int8 channel:0"), TensorQuantizer("int8 channel:0")
    target.load_state_dict(source.state_dict(), assign=True)
    assert same_state(target, source)


def test_a_scale_of_one_element_loads_as_a_number():
    quantizer = TensorQuantizer("uint8")
    state = {"scale": torch.tensor([0.5]), "zero_point": torch.tensor([3], dtype=torch.int32)}
    quantizer.load_state_dict(state)
    assert (quantizer.scale.shape, float(quantizer.scale), int(quantizer.zero_point)) == ((), 0.5, 3)
    assert quantizer.mode is Mode.OFF  # such a state does not contain it
    assert list(state) == ["scale", "zero_point"]


def test_half_a_state_is_a_mistake():
    state = calibrated().state_dict()
    del state["zero_point"]
    with pytest.raises(RuntimeError, match=r"Missing key.*zero_point"):
        TensorQuantizer("uint8").load_state_dict(state)
    state = calibrated().state_dict() | {"colour": torch.tensor(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*colour"):
        TensorQuantizer("uint8").load_state_dict(state)


def test_state_is_three_small_tensors():
    state = calibrated("int8 channel:0").state_dict()
    assert [(k, tuple(v.shape)) for k, v in state.items()][:2] == [("scale", (3,)), ("zero_point", (3,))]
    assert bytes(state["about"].tolist()) == b"int8 symmetric channel:0; 2; enabled"
    assert len(state) == 3


# ------------------------------------------------------------------------------------------- another spec


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ("int7", "int4"),
        ("int8", "int8 narrow"),
        ("uint8", "int8"),
        ("uint8 channel:0", "uint8"),
        ("int8 channel:0", "int8 channel:1"),
    ],
)
def test_the_state_of_another_spec_is_refused(saved, here):
    source, target = calibrated(saved), calibrated(here)
    target.label, before = "conv1.weight", copy.deepcopy(target)
    specs = [str(q.spec) for q in (target, source)]
    message = "'conv1.weight' is '{}', but the checkpoint has '{}'".format(*specs)
    for state in (source.state_dict(), dict(source.state_dict())):  # with metadata, and without, as in safetensors
        with pytest.raises(RuntimeError, match=message):
            target.load_state_dict(state, strict=False)
    assert same_state(target, before)


def test_a_descriptor_of_another_spec_is_refused():
    source, target = make(num_bits=7, amax=1.0), make(num_bits=4, amax=2.0)
    with pytest.raises(
        RuntimeError, match="is 'int4 symmetric tensor', but the checkpoint has 'int7 symmetric tensor'"
    ):
        target.load_state_dict(source.state_dict())
    assert target.amax.item() == 2.0


def test_without_a_spec_shapes_must_fit():
    state = {k: v for k, v in calibrated("uint8 channel:0").state_dict().items() if k != "about"}
    target = calibrated("uint8")
    before = copy.deepcopy(target)
    with pytest.raises(RuntimeError, match=r"a scale of shape \(3,\) does not fit the quantizer: 'uint8 affine"):
        target.load_state_dict(state)
    assert same_state(target, before)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture
def x():
    return torch.randn(8, 3, 8, 8)


def trained(x):
    """A float net whose norm does something."""
    net = Net()
    with torch.no_grad():
        for _ in range(3):
            net(x * 2 + 1)
        net.norm.weight.uniform_(0.5, 2.0)
    return net.eval()


def prepared(net, x, bits=8, method="FixedFakeQuantize"):
    tensors = {"method": method} | ({} if bits == 8 else {"bits": bits})
    return bw.prepare(net, x, "onnxruntime", recipe={"weight": tensors, "activation": {"method": method}})


def test_a_model_of_other_bits_is_refused(x):
    source, target = (bw.calibrate(prepared(trained(x), x, bits), [x]) for bits in (7, 4))
    with pytest.raises(RuntimeError, match=r"'conv\.weight' is 'int4 .*', but the checkpoint has 'int7 "):
        target.load_state_dict(source.state_dict())


# ------------------------------------------------------------------------------- float and prepared models


@pytest.mark.parametrize("method", ["FixedFakeQuantize", "LearnableFakeQuantize"])
def test_float_and_prepared_states_load_both_ways(x, method):
    net = trained(x)
    model = bw.calibrate(prepared(net, x, method=method), [x])
    other = trained(x)
    before = {n: copy.deepcopy(q.state_dict()) for n, q in quantizers(model).items()}
    result = model.load_state_dict(other.state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for name, quantizer in quantizers(model).items():
        now = quantizer.state_dict()
        assert all(torch.equal(now[key], value) for key, value in before[name].items())
    back = Net()
    assert str(back.load_state_dict(bw.float_state_dict(model), strict=True)) == "<All keys matched successfully>"
    assert torch.equal(back.eval()(x), other(x))


def test_a_float_model_takes_over_what_training_gave(x):
    model = bw.calibrate(prepared(trained(x), x, method="LearnableFakeQuantize"), [x])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    model.eval()
    back = Net()
    back.load_state_dict(bw.float_state_dict(model), strict=True)
    for quantizer in quantizers(model).values():
        quantizer.disable()
    assert torch.allclose(back.eval()(x), model(x), atol=1e-6)


def test_swapped_layers_load_both_ways(x):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    model = bw.calibrate(bw.swap_modules(net, example_inputs=x), [x])
    twin = copy.deepcopy(net)
    model.load_state_dict(twin.state_dict(), strict=True)
    twin.load_state_dict(bw.float_state_dict(model), strict=True)
    shared = nn.Sequential(model[0], model[0])  # a layer under two names
    nn.Sequential(net[0], net[0]).load_state_dict(bw.float_state_dict(shared), strict=True)


def test_quantized_checkpoints_survive_a_file(x):
    source, target = (prepared(trained(x), x, method="LearnableFakeQuantize") for _ in range(2))
    bw.calibrate(source, [x])
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(target(x), source(x))
    assert all(q.quantizes for q in quantizers(target).values())


# ----------------------------------------------------------------------------------------- by descriptors

SAVED = {
    "plain": {},
    "amax": {"amax": 0.7},
    "channels": {"axis": 0, "amax": [1.0, 0.5], "num_bits": 4, "narrow_range": True},
    "unsigned": {"unsigned": True, "amax": 1.5, "scale_amax": 0.9},
    "real": {"fake_quant": False, "amax": 1.0},
    "fp8": {"num_bits": (4, 3), "amax": 1.0},
    "learned": {"learn_amax": True, "amax": 0.8},
}


@pytest.mark.parametrize("kind", SAVED)
def test_states_of_descriptors_load(kind, tmp_path):
    source, target = make(**SAVED[kind]), make(**{**SAVED[kind], "amax": None})
    if kind == "learned":
        source.clip.clip_value_max.data.fill_(0.3)
    if kind == "amax":
        source.pre_quant_scale = torch.tensor([1.0, 0.5, 2.0])
    source.enable_calib()
    torch.save(nn.Sequential(source).state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    result = nn.Sequential(target).load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x = X.abs() if kind == "unsigned" else X
    assert torch.equal(target(x), source(x))
    assert target.mode == source.mode == Mode.OBSERVE | Mode.QUANTIZE
    assert set(target.state_dict()) == set(source.state_dict())
    assert all(v.numel() <= 4 for v in state.values())


def test_the_keys_are_those_of_the_old_toolkit():
    assert list(make().state_dict()) == []
    assert list(make(amax=1.0).state_dict()) == ["_amax"]


def test_other_states_load():
    target = make(amax=0.7)
    target.load_state_dict({"_amax": torch.tensor([[2.0]])})  # as the old toolkit saves it
    assert target.amax.shape == (1, 1)
    assert float(target.range()[1]) == pytest.approx(2.0)
    target.load_state_dict({})  # as a float model's twin
    assert target.amax.item() == 2.0
    target.load_state_dict(make().state_dict())
    assert target.amax is None
    disabled = make(amax=0.7)
    disabled.disable()
    target.load_state_dict(disabled.state_dict())
    assert not target.quantizes
    target.enable()
    assert target.quantizes
    learned = make(learn_amax=True)
    assert learned.load_state_dict({}).missing_keys == []
    learned.load_state_dict({"clip.clip_value_min": torch.tensor(-2.0), "clip.clip_value_max": torch.tensor(3.0)})
    assert (learned.clip.clip_value_min.item(), learned.clip.clip_value_max.item()) == (-2, 3)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*colour"):
        target.load_state_dict({"colour": torch.tensor(1)})


def test_a_range_by_scale_loads_into_a_descriptor_and_back():
    described, plain = make(), calibrated("int8")
    described.load_state_dict(plain.state_dict())
    assert torch.equal(described(X), plain(X))
    by_amax = make(amax=1.3)
    plain.load_state_dict(by_amax.state_dict())
    assert torch.equal(plain(X), by_amax(X))


def test_a_text_that_is_no_state_is_refused():
    state = {"about": torch.tensor(list(b"nonsense"), dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="cannot read 'nonsense'"):
        TensorQuantizer("int8").load_state_dict(state)
