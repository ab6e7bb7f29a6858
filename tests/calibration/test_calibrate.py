"""Calibrate: what is seen, what is kept, what is refused, and what is left behind after a failure."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.calibration import as_inputs
from bitwright.errors import CalibrationError
from bitwright.nn.bias import INT32_MAX
from bitwright.observers import OBSERVERS, register_observer
from bitwright.observers.minmax import MinMaxObserver
from bitwright.quantizer import Mode, quantizers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def image(batch=2):
    return torch.randn(batch, 3, 8, 8)


@pytest.fixture
def model():
    return bw.prepare(Net(), image())


def state(model):
    return {n: (q.mode, q.scale.clone(), q.zero_point.clone()) for n, q in quantizers(model).items()}


def same(one, other):
    return list(one) == list(other) and all(
        a[0] is b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
        for a, b in zip(one.values(), other.values(), strict=True)
    )


# ------------------------------------------------------------------------------------------------- what it does


def test_the_model_itself_comes_back_quantizing(model):
    assert bw.calibrate(model, [image()]) is model
    assert {q.mode for q in quantizers(model).values()} == {Mode.QUANTIZE}
    assert all(q.calibrated for q in quantizers(model).values())


def test_ranges_are_those_of_the_data(model):
    batches = [image(4), 3 * image(2), image(1)]
    bw.calibrate(model, batches)
    x = torch.cat(batches)
    quantizer = model.get_submodule("bitwright.quantizers.x")
    scale = (x.max() - x.min()) / 255
    assert torch.allclose(quantizer.scale, scale)
    assert int(quantizer.zero_point) == round(float(-x.min() / scale))
    weight = model.conv.folded_weight()[0]
    assert torch.equal(model.conv.weight_quantizer.scale, weight.detach().abs().amax((1, 2, 3)) / 63)


def test_the_order_and_size_of_batches_do_not_matter(model):
    data = image(8)
    twin = copy.deepcopy(model)
    bw.calibrate(model, data.split(2))
    bw.calibrate(twin, data.flip(0).split(3))
    one, other = state(model), state(twin)
    assert all(torch.allclose(one[n][1], other[n][1], rtol=1e-5) for n in one)


def test_calibrating_twice_gives_the_same(model):
    batches = [image(), image()]
    bw.calibrate(model, batches)
    first = state(model)
    bw.calibrate(model, batches)
    assert same(state(model), first)
    bw.calibrate(model, [5 * b for b in batches])
    assert not same(state(model), first)


def test_weights_are_seen_once(model):
    calls = []

    @register_observer("CountingObserver")
    class Counting(MinMaxObserver):
        def observe(self, x):
            calls.append(tuple(x.shape))
            super().observe(x)

    try:
        recipe = {"weight": {"observer": "CountingObserver"}}
        counted = bw.prepare(Net(), image(), recipe=recipe)
        bw.calibrate(counted, [image() for _ in range(5)])
    finally:
        OBSERVERS.unregister("CountingObserver")
    assert sorted(calls) == [(4, 6), (6, 3, 3, 3)]


def test_nothing_but_small_state_is_kept(model):
    kept = []

    def batches():
        for _ in range(3):
            yield image(16)
            kept.append(
                [
                    v.numel()
                    for q in quantizers(model).values()
                    for v in vars(q.observer).values()
                    if isinstance(v, torch.Tensor)
                ]
            )

    bw.calibrate(model, batches())
    assert len(kept) == 3
    assert all(sizes and max(sizes) <= 6 for sizes in kept)
    assert all(q.observer.batches == 0 for q in quantizers(model).values())


def test_no_graph_is_built_and_modes_are_kept(model):
    grads, trainings = [], []

    def look(*_):
        grads.append(torch.is_grad_enabled())
        trainings.append(model.bn.training)

    model.get_submodule("bitwright.quantizers.x").register_forward_hook(look)
    model.train()
    before = copy.deepcopy(model.bn.state_dict())
    bw.calibrate(model, [image()])
    assert (grads, trainings) == ([False], [False])
    assert model.training
    assert model.bn.training
    assert all(torch.equal(v, before[k]) for k, v in model.bn.state_dict().items())
    assert model.conv.weight.grad is None


# ----------------------------------------------------------------------------------------------- kinds of data


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x, y):
        return self.a(x) + self.b(y)


def test_tuples_lists_and_dicts():
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    results = []
    for example in ((x, y), {"x": x, "y": y}):
        for batch in ((x, y), [x, y], {"x": x, "y": y}, {"y": y, "x": x}):
            torch.manual_seed(3)
            model = bw.prepare(Two(), example)
            bw.calibrate(model, [batch])
            results.append([v for _, v, _ in state(model).values()])
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


def test_labels_are_left_out(model):
    images, labels = image(4), torch.arange(4)
    twin = copy.deepcopy(model)
    bw.calibrate(model, [(images, labels), [images, labels, {"id": 3}]])
    bw.calibrate(twin, [images])
    assert same(state(model), state(twin))
    dataset = torch.utils.data.TensorDataset(images, labels)
    bw.calibrate(model, torch.utils.data.DataLoader(dataset, batch_size=4))
    assert same(state(model), state(twin))


def test_as_inputs():
    x = torch.ones(2)
    assert as_inputs(x, 1).args == (x,)
    assert as_inputs((x, 3), 1).args == (x,)
    assert as_inputs([x, x, 3], 2).args == (x, x)
    assert as_inputs({"x": x}, 1).kwargs == {"x": x}
    assert as_inputs((x, x), 0).args == (x, x)


def test_a_progress_bar_is_optional(model, capsys):
    bw.calibrate(model, [image()], progress=False)
    assert capsys.readouterr() == ("", "")
    bw.calibrate(model, [image()], progress=True)
    assert capsys.readouterr().out == ""


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("data", [[], iter(()), (x for x in ())])
def test_empty_data(model, data):
    before = state(model)
    with pytest.raises(CalibrationError, match="the calibration data is empty: it yielded no batch"):
        bw.calibrate(model, data)
    assert same(state(model), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity(model, value):
    good, bad = image(), image()
    bad[0, 0, 0, 0] = value
    with pytest.raises(
        CalibrationError, match="calibration batch 2 produces NaN or infinity in the output of x; check the data"
    ):
        bw.calibrate(model, [good, bad])


def test_nan_in_a_weight(model):
    with torch.no_grad():
        model.fc.weight[1, 2] = float("nan")
    with pytest.raises(CalibrationError, match=r"'fc.weight' cannot be calibrated: NaN or infinity was seen"):
        bw.calibrate(model, [image()])


def test_a_batch_the_model_refuses(model):
    with pytest.raises(CalibrationError, match=r"the model refuses calibration batch 2 \(float32\[2, 5\]\): Runtime"):
        bw.calibrate(model, [image(), torch.randn(2, 5)])
    with pytest.raises(CalibrationError, match=r"refuses calibration batch 1 \(images=float32\[2, 3, 8, 8\]\): TypeE"):
        bw.calibrate(model, [{"images": image()}])


def test_errors_of_the_data_itself_pass_through(model):
    def broken():
        yield image()
        raise OSError("the disk is gone")

    before = state(model)
    with pytest.raises(OSError, match="the disk is gone"):
        bw.calibrate(model, broken())
    assert same(state(model), before)


def test_layers_that_no_data_reaches_stay_float(caplog):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) if float(x.sum()) > 0 else self.b(x)

    original = Branch()
    model = bw.prepare(original, torch.ones(1, 3))
    bw.calibrate(model, [torch.ones(2, 3)])
    note = "calibration data never reached these, so they stay float: b.weight, input of b"
    assert bw.ledger_of(model).notes[-1] == note
    assert note in caplog.text
    assert {name for name, q in quantizers(model).items() if not q.enabled} == {
        "b._input_quantizer",
        "b._weight_quantizer",
    }
    x = torch.randn(2, 3) - 10
    assert torch.equal(model(x), original(x))
    for quantizer in quantizers(model).values():
        quantizer.enable()
    bw.calibrate(model, [torch.ones(2, 3), -torch.ones(2, 3)])
    assert all(q.calibrated for q in quantizers(model).values())


def test_empty_batches_alone_are_nothing(model):
    with pytest.raises(CalibrationError, match="'output of x' cannot be calibrated: no data was seen"):
        bw.calibrate(model, [image(0)])


@pytest.mark.filterwarnings("ignore:.*runs as written")
def test_layers_inside_vmap_are_refused():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return torch.vmap(self.fc)(x)

    model = bw.prepare(Mapped(), torch.randn(2, 3))
    with pytest.raises(
        CalibrationError, match=r"'input of fc' is called inside torch\.vmap, .* leave it float \(skip=…"
    ):
        bw.calibrate(model, [torch.randn(2, 3)])


def test_nothing_to_calibrate():
    model = bw.prepare(nn.Sequential(nn.GELU()), image())
    with pytest.raises(CalibrationError, match="the model has no quantizer: nothing in it runs in integers"):
        bw.calibrate(model, [image()])


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_failure_leaves_all_as_it_was(model, calibrated):
    if calibrated:
        bw.calibrate(model, [image()])
    before = state(model)
    x = image()
    with torch.no_grad():
        expected = model(x)
    bad = image()
    bad[:] = float("nan")

    def interrupted():
        yield image()
        raise KeyboardInterrupt

    for data, error in (([image(), bad], CalibrationError), (interrupted(), KeyboardInterrupt)):
        with pytest.raises(error):
            bw.calibrate(model, data)
        assert same(state(model), before)
        assert not model.training
        assert all(q.observer.batches == 0 for q in quantizers(model).values())
        with torch.no_grad():
            assert torch.equal(model(x), expected)


# ---------------------------------------------------------------------------------------------- the int32 bias


@pytest.mark.parametrize("kind", ["conv", "transposed", "linear", "norm"])
def test_a_dead_channel_with_a_bias_does_not_overflow(kind):
    layer = {
        "conv": lambda: nn.Conv2d(3, 4, 1),
        "transposed": lambda: nn.ConvTranspose2d(3, 4, 2, stride=2),
        "linear": lambda: nn.Linear(8, 4),
        "norm": lambda: nn.Conv2d(3, 4, 1),
    }[kind]()
    with torch.no_grad():
        axis = 1 if kind == "transposed" else 0
        layer.weight.select(axis, 2).zero_()
        layer.bias[2] = 300.0
    parts = [layer]
    if kind == "norm":
        norm = nn.BatchNorm2d(4)
        norm.running_var[1] = 1e-12
        norm.bias.data[2] = -700.0
        parts.append(norm)
    net = nn.Sequential(*parts).eval()
    x = 1e-3 * image()
    model = bw.prepare(net, x)
    bw.calibrate(model, [x])
    layer = model.get_submodule("0")
    weight, bias = layer.folded_weight()
    integers = bias.double() / layer.bias_scale().double()
    assert float(integers.detach().abs().max()) < INT32_MAX
    deployed = layer.deploy(weight, bias)[1]
    assert torch.allclose(deployed, bias, rtol=1e-5)
    with torch.no_grad():
        assert torch.allclose(layer(x), net(x), rtol=0.01, atol=0.05)


def test_other_scales_are_left_alone_by_the_guard():
    model = bw.prepare(nn.Sequential(nn.Linear(8, 4)), torch.randn(1, 8))
    bw.calibrate(model, [torch.randn(16, 8)])
    layer = model.get_submodule("0")
    assert torch.equal(layer.weight_quantizer.scale, layer.weight.detach().abs().amax(1) / 63)


def test_the_bias_is_rounded_to_its_integers(model):
    bw.calibrate(model, [image()])
    scale = model.fc.bias_scale()
    assert torch.allclose(scale, model.fc.input_quantizer.scale * model.fc.weight_quantizer.scale)
    weight, bias = model.fc.deploy(*model.fc.folded_weight())
    assert torch.allclose(bias / scale, (bias / scale).round(), atol=1e-3)
    assert bool(((bias - model.fc.bias).abs() <= scale / 2 + 1e-7).all())
    assert torch.equal(weight, model.fc.weight_quantizer(model.fc.weight))
    bias.sum().backward()
    assert torch.equal(model.fc.bias.grad, torch.ones(4))


def test_a_shared_moving_average_counts_a_batch_once():
    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat([x, 20 * torch.tanh(x)], 1)

    batches = [torch.full((1, 4, 2, 2), 1.0), torch.full((1, 4, 2, 2), 0.5)]
    recipe = {"activation": {"observer": "EMAMinMaxObserver"}}
    prepared = bw.prepare(Joined(), batches[0], "openvino", recipe=recipe)
    bw.calibrate(prepared, batches)
    # Of the two tensors with one scale, x and 20·tanh(x), the second is the larger in both batches.
    highest = [20 * float(torch.tanh(b).max()) for b in batches]
    (quantizer,) = quantizers(prepared).values()
    assert float(quantizer.range()[1]) == pytest.approx(0.9 * highest[0] + 0.1 * highest[1], rel=1e-5)


class Experts(nn.Module):
    """A mixture of experts in one graph: each computes the tokens that chose it, which may be none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x, choice):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = torch.where(choice == number)[0]
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out


def test_an_expert_without_tokens():
    model, x = Experts().eval(), torch.randn(6, 4)
    quantized = bw.prepare(model, (x, torch.tensor([0, 1, 2, 0, 1, 2])))
    assert bw.ledger_of(quantized).islands == {}
    few = torch.tensor([0, 1, 0, 1, 0, 0])
    bw.calibrate(quantized, [(x, few), (x, torch.zeros_like(few))])
    float_layers = {name for name, q in quantizers(quantized).items() if not q.enabled}
    assert {"experts.2.2._weight_quantizer"} <= float_layers
    assert not any("experts.0" in name or "experts.1" in name for name in float_layers)
    with torch.no_grad():
        for choice in (few, torch.full_like(few, 2), few * 0 + 1):
            assert (quantized(x, choice) - model(x, choice)).abs().max() < 0.1
