"""Prepare: where quantizers sit, what is folded and fused, rules and overrides, and what is refused."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import bitwright as bw
from bitwright.backends import Backend, find_backend
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.nn import QuantConv2d, QuantFunction, QuantLinear
from bitwright.nn.mixins import PlacedQuantizer
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import register_qmodule, unregister_qmodule
from bitwright.preparation import Verdict
from bitwright.quantizer import Mode, quantizers


class Probe(nn.Module):
    """A bit of everything: stem, pool, residual block, concatenation, upsampling, gate, head."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.branch, self.scaled = nn.Conv2d(8, 4, 1), nn.Conv2d(12, 8, 1)
        self.up, self.bn3 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8)
        self.gate, self.avg, self.fc = nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.bn(self.stem(x))))
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        out = self.relu(out)
        out = torch.cat([out, self.branch(x)], 1)
        out = self.scaled(out) * 2.0
        out = F.interpolate(self.relu(self.bn3(self.up(out))), scale_factor=2)
        out = out * torch.sigmoid(self.gate(out))
        return self.fc(torch.flatten(self.avg(out), 1))


def image(batch=2):
    return torch.randn(batch, 3, 16, 16)


def placed(model):
    """Which tensors are quantized, by which quantizer, for whom."""
    found = []
    for node in model.graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), bw.TensorQuantizer):
            name = node.target.removeprefix("bitwright.quantizers.")
            found.append((node.args[0].name, name, sorted(u.name for u in node.users)))
    return found


def verdicts(model):
    return {e.name: e.verdict for e in bw.ledger_of(model).entries}


# -------------------------------------------------------------------------------------------------- placement

PLACEMENT = {
    "onnxruntime": [
        ("x", "x", ["stem"]),
        ("relu", "relu", ["pool"]),
        ("relu_1", "relu_1", ["conv2"]),
        ("conv2", "conv2", ["add"]),
        ("relu_2", "relu_2", ["cat"]),
        ("branch", "branch", ["cat"]),
        ("cat", "cat", ["scaled"]),
        ("scaled", "scaled", ["up"]),
        ("relu_3", "relu_3", ["interpolate"]),
        ("gate", "gate", ["sigmoid"]),
        ("sigmoid", "sigmoid", ["mul_1"]),
        ("mul_1", "mul_1", ["avg"]),
        ("avg", "avg", ["flatten"]),
    ],
    "openvino": [
        ("x", "x", ["stem"]),
        ("relu", "relu", ["pool"]),
        ("relu_1", "relu_1", ["conv2"]),
        ("conv2", "conv2", ["add"]),
        ("relu_2", "relu_2", ["cat"]),
        ("branch", "relu_2", ["cat"]),
        ("cat", "cat", ["scaled"]),
        ("scaled", "scaled", ["up"]),
        ("relu_3", "relu_3", ["interpolate"]),
        ("mul_1", "mul_1", ["avg"]),
        ("avg", "avg", ["flatten"]),
    ],
}


@pytest.mark.parametrize("backend", PLACEMENT)
def test_where_quantizers_sit(backend):
    assert placed(bw.prepare(Probe(), image(), backend)) == PLACEMENT[backend]


def test_how_every_operator_computes():
    model = bw.prepare(Probe(), image(), "onnxruntime")
    found = [(e.name, e.verdict.value, e.reason) for e in bw.ledger_of(model).entries]
    folded = "folded into the layer before it"
    assert found == [
        ("stem", "integer", ""),
        ("bn", "fused", folded),
        ("relu", "fused", "computed with stem"),
        ("pool", "carried", ""),
        ("conv1", "integer", ""),
        ("bn1", "fused", folded),
        ("relu", "fused", "computed with conv1"),
        ("conv2", "integer", ""),
        ("bn2", "fused", folded),
        ("add", "integer", ""),
        ("relu", "fused", "computed with add"),
        ("branch", "integer", ""),
        ("cat", "integer", ""),
        ("scaled", "integer", ""),
        ("mul", "fused", folded),
        ("up", "integer", ""),
        ("bn3", "fused", folded),
        ("relu", "fused", "computed with up"),
        ("interpolate", "carried", ""),
        ("gate", "integer", ""),
        ("sigmoid", "integer", ""),
        ("mul_1", "integer", ""),
        ("avg", "integer", ""),
        ("flatten", "carried", ""),
        ("fc", "integer", ""),
    ]
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert entries["stem"].weight == "int7 symmetric narrow channel:0"
    assert entries["up"].weight == "int7 symmetric narrow channel:1"
    assert (entries["fc"].input, entries["fc"].output) == ("uint8 affine tensor", "")
    assert entries["cat"].output == "uint8 affine tensor"
    assert bw.ledger_of(model).count() == Counter({Verdict.INTEGER: 13, Verdict.FUSED: 9, Verdict.CARRIED: 3})


@pytest.mark.parametrize("backend", PLACEMENT)
def test_every_quantizer_runs_once_for_each_tensor(backend):
    model = bw.prepare(Probe(), image(), backend)
    calls = Counter()
    for name, quantizer in quantizers(model).items():
        quantizer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    bw.calibrate(model, [image()])
    calls.clear()
    model(image())
    expected = Counter(f"bitwright.quantizers.{q}" for _, q, _ in PLACEMENT[backend])
    weights = [n for n in quantizers(model) if n.endswith("_weight_quantizer")]
    assert calls == expected + Counter(weights)


def test_layers_know_the_quantizer_of_their_input():
    model = bw.prepare(Probe(), image())
    shared = model.get_submodule("bitwright.quantizers.relu")
    for name in ("conv1", "branch"):
        assert isinstance(model.get_submodule(name).input_quantizer, PlacedQuantizer)
        assert model.get_submodule(name).input_quantizer.quantizer is shared
    assert model.fc.input_quantizer.quantizer is model.get_submodule("bitwright.quantizers.avg")
    assert model.fc.input_quantizer.spec == shared.spec
    assert not any("input_quantizer" in key for key in model.state_dict())
    assert "placed TensorQuantizer" in repr(model.fc.input_quantizer)


def test_the_probe_is_exact_when_off_and_close_when_on():
    net = Probe().eval()
    for norm in (net.bn, net.bn1, net.bn2, net.bn3):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
    for backend in PLACEMENT:
        model = bw.prepare(net, image(), backend)
        x = image(3)
        with torch.no_grad():
            assert torch.equal(model(x), net(x))
            bw.calibrate(model, [x])
            noise = (model(x) - net(x)).pow(2).mean() / net(x).pow(2).mean()
        assert float(noise) < 0.01


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))


def test_a_layer_used_twice_shares_the_quantizer_of_its_input():
    model = bw.prepare(Twice(), image(), "onnxruntime")
    names = [(tensor, quantizer) for tensor, quantizer, _ in placed(model)]
    assert ("x", "x") in names
    assert ("tanh", "x") in names
    assert model.conv.input_quantizer.quantizer is model.get_submodule("bitwright.quantizers.x")
    bw.calibrate(model, [image(), 9 * image()])
    _, highest = model.conv.input_quantizer.range()
    assert float(highest) > 5


def test_a_float_operator_keeps_its_float_result_for_others():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = F.gelu(x)
            return self.conv(y), y

    model = bw.prepare(Fork(), image(), "onnxruntime")
    x = image()
    bw.calibrate(model, [x])
    assert torch.equal(model(x)[1], F.gelu(x))
    assert ("gelu", "gelu", ["conv"]) in placed(model)


def test_several_graph_inputs_and_constants():
    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.bias = nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x, y):
            return self.conv(x) + y + self.bias

    x, y = image(), torch.randn(2, 4, 16, 16)
    model = bw.prepare(Join(), (x, y), "onnxruntime")
    assert {tensor for tensor, _, _ in placed(model)} == {"x", "conv", "y", "add", "bias", "add_1"}
    bw.calibrate(model, [(x, y)])
    assert torch.allclose(model(x, y), model.conv(x) + y + model.bias, atol=0.2)


def test_a_node_may_be_called_like_a_method_of_modules():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x.half().to(torch.float32)) + self.conv(x.double().float())

    net, x = Cast().eval(), image()
    model = bw.prepare(net, x)
    bw.calibrate(model, [x])
    assert torch.allclose(model(x), net(x), atol=0.1)
    assert not {tensor for tensor, _, _ in placed(model)} & {"half", "to", "double", "float"}


@pytest.mark.parametrize(
    ("mover", "carries"),
    [
        (lambda x: F.interpolate(x, scale_factor=2), True),
        (lambda x: F.interpolate(x, None, 2, "nearest-exact"), True),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), False),
        (lambda x: F.interpolate(x, (5, 5), None, "bicubic"), False),
        (nn.Upsample(scale_factor=2), True),
        (nn.Upsample(scale_factor=2, mode="bilinear"), False),
        (lambda x: F.pad(x, (1, 1)), True),
        (lambda x: F.pad(x, (1, 1), value=0.0), True),
        (lambda x: F.pad(x, (1, 1), "constant", 1.5), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect", value=None), True),
        (nn.ZeroPad2d(1), True),
        (nn.ConstantPad2d(1, -3.0), False),
        (nn.ReflectionPad2d(1), True),
        (nn.ReplicationPad2d(1), True),
        (nn.CircularPad2d(1), True),
        (nn.MaxPool2d(2), True),
        (lambda x: F.max_pool2d(x, 2, ceil_mode=True), True),
        (nn.AdaptiveMaxPool2d(1), True),
        (lambda x: x.permute(0, 2, 3, 1).flatten(1)[:, None, None], True),
        (nn.Dropout(0.5), True),
        (lambda x: torch.chunk(x, 2, 1)[0], True),
        (lambda x: F.softplus(x), False),
    ],
)
def test_what_only_moves_values_carries_the_scale_on(mover, carries):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.LazyConv2d(2, 1)
            self.mover = mover

        def forward(self, x):
            return self.second(self.mover(self.first(x)))

    net, x = Net().eval(), image()
    net(x)
    model = bw.prepare(net, x, "openvino")
    names = [tensor for tensor, _, _ in placed(model)]
    assert len(names) == 2
    assert (names[1] == "first") is carries
    assert (Verdict.CARRIED in verdicts(model).values()) is carries


# ---------------------------------------------------------------------------------------------------- folding


def fold_notes(body, **layers):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def forward(self, x):
            return body(self, x)

    net = Net().eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d) and norm.running_mean is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 3, 6, 6)
    model = bw.prepare(net, x)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
    notes = bw.ledger_of(model).notes
    return [n.removeprefix("fold_batchnorm: ") for n in notes if n.startswith("fold_batchnorm: ")], model, net


def test_folding_notes():
    norm = nn.BatchNorm2d
    notes, model, net = fold_notes(
        lambda self, x: self.b(self.a(x)), a=nn.Conv2d(3, 4, 1), b=norm(4, affine=False, eps=0.1)
    )
    assert notes == ["folded b into a"]
    assert model.a.folded_norm is model.b
    weight, bias = model.a.folded_weight()
    factor = 1 / torch.sqrt(net.b.running_var + 0.1)
    assert torch.allclose(weight, net.a.weight * factor.reshape(-1, 1, 1, 1))
    assert torch.allclose(bias, (net.a.bias - net.b.running_mean) * factor)


@pytest.mark.parametrize(
    ("body", "layers", "note"),
    [
        (
            lambda self, x: (lambda y: self.b(y) + y)(self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, a before it has 2 users",
        ),
        (
            lambda self, x: self.b(self.a(x)) + self.b(self.c(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4), "c": nn.Conv2d(3, 4, 1)},
            "not folded: b, it or the layer before it is called more than once",
        ),
        (
            lambda self, x: self.b(self.a(x)) + self.a(x),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, it or the layer before it is called more than once",
        ),
        (
            lambda self, x: self.b(torch.relu(self.a(x))),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4)},
            "not folded: b, relu before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.b(self.r(self.a(x))),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4), "r": nn.ReLU()},
            "not folded: b, r before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.a(self.b(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(3)},
            "not folded: b, x before it is not a quantized layer with a weight",
        ),
        (
            lambda self, x: self.b(self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1), "b": nn.BatchNorm2d(4, track_running_stats=False)},
            "not folded: b, it has no running statistics",
        ),
        (
            lambda self, x: self.b(self.a(x.flatten(2))),
            lambda: {"a": nn.Linear(36, 5), "b": nn.BatchNorm1d(3)},
            "not folded: b, it normalises another axis than the one the linear layer produces",
        ),
        (
            lambda self, x: self.b(self.a(x.flatten(1))),
            lambda: {"a": nn.Linear(108, 5), "b": nn.BatchNorm1d(5)},
            "folded b into a",
        ),
        (
            lambda self, x: self.b(input=self.a(x)),
            lambda: {"a": nn.Conv2d(3, 4, 1, groups=1, bias=False), "b": nn.BatchNorm2d(4)},
            "folded b into a",
        ),
    ],
)
def test_when_a_norm_is_folded(body, layers, note):
    notes, _, _ = fold_notes(body, **layers())
    assert note in notes


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_folds_into_a_transposed_convolution(groups):
    notes, model, net = fold_notes(
        lambda self, x: self.b(self.a(self.c(x))),
        c=nn.Conv2d(3, 4, 1),
        a=nn.ConvTranspose2d(4, 6, 2, stride=2, groups=groups),
        b=nn.BatchNorm2d(6),
    )
    assert notes == ["folded b into a"]
    x = torch.randn(2, 4, 5, 5)
    weight, bias = model.a.folded_weight()
    folded = F.conv_transpose2d(x, weight, bias, stride=2, groups=groups)
    assert torch.allclose(folded, net.b(net.a(x)), atol=1e-5)
    y = torch.randn(2, 3, 6, 6)
    bw.calibrate(model, [y])
    assert float((model(y) - net(y)).detach().pow(2).mean()) < 0.01 * float(net(y).detach().pow(2).mean())


def test_training_still_moves_the_statistics_of_a_folded_norm():
    _, model, net = fold_notes(lambda self, x: self.b(self.a(x)), a=nn.Conv2d(3, 4, 1), b=nn.BatchNorm2d(4))
    x = torch.randn(4, 3, 6, 6)
    assert torch.equal(model.train()(x), net.train()(x))
    assert torch.equal(model.b.running_mean, net.b.running_mean)
    assert int(model.b.num_batches_tracked) == 1


# ------------------------------------------------------------------------------------------------------ rules


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.other = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.block(x)
        return self.fc((self.other(x) + x).mean((2, 3)))


@pytest.mark.parametrize(
    ("skip", "floats"),
    [
        (["fc"], {"fc"}),
        ("fc", {"fc"}),
        (["block"], {"block.0", "block.2"}),
        (["block.0", "other"], {"block.0", "other"}),
        (["*.2"], {"block.2"}),
        (["block.?"], {"block.0", "block.2"}),
        ([r"re:block\.\d"], {"block.0", "block.2"}),
        (["op:conv2d"], {"block.0", "block.2", "other"}),
        (["op:lin*", "op:add"], {"fc", "add"}),
    ],
)
def test_skipping(skip, floats):
    model = bw.prepare(Small(), image(), skip=skip)
    weighty = {"block.0", "block.2", "other", "fc", "add"}
    assert {n for n, v in verdicts(model).items() if v is Verdict.FLOAT} & weighty == floats
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    rules = [skip] if isinstance(skip, str) else skip
    assert all(entries[n].reason in {f"skipped by the rule {r!r}" for r in rules} for n in floats)
    assert all(entries[n].rule in rules for n in floats)
    for name in floats - {"add"}:
        assert type(model.get_submodule(name)) in (nn.Conv2d, nn.Linear)
    bw.calibrate(model, [image()])


def test_a_skipped_activation_is_not_fused():
    model = bw.prepare(Small(), image(), "onnxruntime", skip=["block.1"])
    assert verdicts(model)["block.1"] is Verdict.FLOAT
    assert ("block_0", "block_0", ["block_1"]) in placed(model)


def test_overrides():
    model = bw.prepare(Small(), image(), weight="int4 narrow channel:0", activation="int8 affine")
    assert str(model.fc.weight_quantizer.spec) == "int4 symmetric narrow channel:0"
    assert {str(q.spec) for n, q in quantizers(model).items() if n.startswith("bitwright.quantizers.")} == {
        "int8 affine tensor"
    }
    whole = bw.prepare(Small(), image(), weight="int8 narrow")
    assert str(whole.fc.weight_quantizer.spec) == "int8 symmetric narrow tensor"
    bw.calibrate(whole, [image()])
    assert whole.fc.weight_quantizer.scale.shape == ()


def test_rules_over_recipe_over_backend(tmp_path):
    recipe = {
        "backend": "openvino",
        "weight": "int8 narrow channel:0",
        "activation": {"observer": "ema_minmax", "observer_options": {"ema_ratio": 0.5}},
        "rules": [
            {"match": "block", "weight": "int4 narrow channel:0"},
            {"match": "block.2", "weight": "int6 narrow channel:0", "activation": {"observer": "minmax"}},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    for source in (recipe, path, bw.Recipe.parse(recipe)):
        model = bw.prepare(Small(), image(), recipe=source)
        assert bw.ledger_of(model).backend.name == "openvino"
        bits = {n: model.get_submodule(n).weight_quantizer.spec.bits for n in ("block.0", "block.2", "other", "fc")}
        assert bits == {"block.0": 4, "block.2": 6, "other": 8, "fc": 8}
        assert model.get_submodule("block.0").input_quantizer.observer.ema_ratio == 0.5
        assert model.get_submodule("block.2").input_quantizer.observer_name == "minmax"
    other = bw.prepare(Small(), image(), "onnxruntime", recipe=recipe)
    assert bw.ledger_of(other).backend is find_backend("onnxruntime")


def test_a_backend_of_ones_own():
    mine = Backend.of(
        name="mine",
        title="only linear layers",
        weights="int8 channel:0",
        activations="int8",
        operators={"integer": {"linear": True}},
    )
    model = bw.prepare(Small(), image(), mine)
    assert {n for n, v in verdicts(model).items() if v is Verdict.INTEGER} == {"fc"}
    assert {e.reason for e in bw.ledger_of(model).entries if e.name == "other"} == {"mine runs it in float"}


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "onnxrt"}, UnknownNameError, "unknown backend 'onnxrt': did you mean 'onnxruntime'"),
        ({"backend": 3}, ConfigError, "backend must be a name or a Backend, not 3"),
        ({"weight": "nit8"}, ConfigError, "unknown number format 'nit8': did you mean 'int8'"),
        ({"weight": "int16"}, ConfigError, "the recipe: onnxruntime has no weights in int16; it has int2, int3"),
        ({"weight": "int8 affine"}, ConfigError, "onnxruntime needs symmetric weights, not 'int8 affine tensor'"),
        ({"weight": "int4 group:32"}, ConfigError, "onnxruntime has no scales per group"),
        ({"activation": "uint4"}, ConfigError, "the recipe: onnxruntime has no activations in uint4; it has int8, ui"),
        ({"activation": "uint8 channel:1"}, ConfigError, "onnxruntime needs one scale per activation tensor"),
        ({"skip": ["fcc"]}, UnknownNameError, "the rule 'fcc' matches no layer: did you mean 'fc'"),
        ({"skip": ["op:relu6"]}, UnknownNameError, "the rule 'op:relu6' matches no layer: did you mean 'op:relu'"),
        ({"skip": ["re:("]}, ConfigError, "'re:\\(' is not a regular expression"),
        ({"skip": [nn.Linear]}, ConfigError, "rules.0.match: Input should be a valid string, not <class"),
        ({"recipe": {"rules": [{"match": "fc", "weight": "int16"}]}}, ConfigError, "the rule 'fc': onnxruntime has no"),
        ({"recipe": {"weight": {"observer": "minmx"}}}, UnknownNameError, "unknown observer 'minmx': did you mean"),
        ({"recipe": {"activation": {"method": "Magic"}}}, UnknownNameError, "unknown method 'Magic'"),
        (
            {"recipe": {"activation": {"observer": "ema_minmax", "observer_options": {"ratio": 1}}}},
            ConfigError,
            "the observer 'ema_minmax' has no option 'ratio': did you mean 'ema_ratio'",
        ),
        ({"recipe": "nowhere.yaml"}, ConfigError, "the recipe 'nowhere.yaml' cannot be read"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        bw.prepare(Small(), image(), **options)


def test_what_cannot_be_is_refused_before_any_work():
    class Untouchable(nn.Module):
        def forward(self, x):
            pytest.fail("the model may not run")

    for options in ({"backend": "onnxrt"}, {"weight": "int16"}, {"skip": ["re:("]}, {"recipe": {"bakend": 1}}):
        with pytest.raises(ConfigError):
            bw.prepare(Untouchable(), image(), **options)


def test_a_model_that_was_not_prepared():
    with pytest.raises(ConfigError, match=r"this Linear was not made by bitwright.prepare"):
        bw.ledger_of(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"this Linear was not made by bitwright.prepare"):
        bw.calibrate(nn.Linear(1, 1), [torch.ones(1)])


# ------------------------------------------------------------------------------------------ functions, swapping


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


def test_other_dtypes_stay_float():
    model = bw.prepare(Small().double(), image().double())
    assert verdicts(model)["fc"] is Verdict.FLOAT
    assert {e.reason for e in bw.ledger_of(model).entries if e.name == "fc"} == {"its input is not float32"}


def test_sizes_are_not_operators():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x.view(x.shape[0] * 2 // 2, x.size(-1))).sum() / x.numel()

    model = bw.prepare(Sized(), torch.randn(2, 3))
    assert [e.operator for e in bw.ledger_of(model).entries] == ["reshape", "linear", "sum", "div"]


# --------------------------------------------------------------------------------------- inputs, results, weights


def specs(model):
    return {e.name: (e.weight, e.input, e.output) for e in bw.ledger_of(model).entries}


def test_weights_only():
    for recipe in ("W4A16", {"weight": {"bits": 4}, "activation": "float"}):
        net = Probe().eval()
        model = bw.prepare(net, image(), recipe=recipe)
        assert placed(model) == []
        entries = {e.name: e for e in bw.ledger_of(model).entries}
        assert entries["stem"].weight == "int4 symmetric narrow channel:0"
        assert (entries["stem"].verdict, entries["stem"].reason) == (
            Verdict.PARTLY,
            "only its weight is quantized, by the recipe",
        )
        assert (entries["add"].verdict, entries["add"].reason) == (Verdict.FLOAT, "left float by the recipe")
        bw.calibrate(model, [image()])
        assert len(model.stem.weight_quantizer.integers(model.stem.folded_weight()[0]).unique()) <= 15
        assert model.fc.bias_scale() is None
        x = image(3)
        with torch.no_grad():
            weight = model.fc.weight_quantizer(net.fc.weight)
            assert torch.equal(
                model.fc(x.mean((2, 3)).repeat(1, 3)[:, :8]),
                F.linear(x.mean((2, 3)).repeat(1, 3)[:, :8], weight, net.fc.bias),
            )
        model.train()(x).sum().backward()
        assert model.fc.weight.grad is not None


def test_activations_only():
    model = bw.prepare(Small(), image(), weight="float")
    assert type(model.fc) is nn.Linear
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert (entries["fc"].verdict, entries["fc"].reason) == (Verdict.PARTLY, "its weight stays float by the recipe")
    assert entries["fc"].input == "uint8 affine tensor"
    bw.calibrate(model, [image()])


def test_rules_for_weight_input_and_output():
    rules = [
        {"match": "block.2", "input": {"observer": "ema_minmax"}, "output": "int8 affine", "weight": "int5 narrow"},
        {"match": "fc", "weight": "float"},
    ]
    model = bw.prepare(Small(), image(), "openvino", recipe={"rules": rules})
    found = specs(model)
    assert found["block.2"] == ("int5 symmetric narrow tensor", "uint8 affine tensor", "int8 affine tensor")
    assert found["fc"][0] == ""
    assert model.get_submodule("block.2").input_quantizer.observer_name == "ema_minmax"
    # What reads the result of block.2 has no wish of its own: it gets the producer's.
    assert model.other.input_quantizer.spec == bw.QuantSpec.parse("int8 affine")
    assert [q for t, q, _ in placed(model) if t == "block_2"] == ["block_2"]
    bw.calibrate(model, [image()])


def test_readers_with_other_wishes_have_quantizers_of_their_own():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            x = self.pool(x)
            return self.a(x), self.b(x), self.c(x)

    model = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "b", "input": "int8"}]})
    # Readers of the pool disagree, so the pool reads float and each quantizes what comes out of it.
    assert sorted(placed(model)) == [("pool", "pool", ["a", "c"]), ("pool", "pool_for_b", ["b"])]
    assert str(model.b.input_quantizer.spec) == "int8 symmetric tensor"
    assert str(model.c.input_quantizer.spec) == "uint8 affine tensor"
    model = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "a", "input": "float"}]})
    assert placed(model) == [("pool", "pool", ["b", "c"])]
    assert specs(model)["a"] == ("int7 symmetric narrow channel:0", "", "")
    agreed = bw.prepare(Fork(), image(), "openvino", recipe={"rules": [{"match": "?", "input": "int8"}]})
    assert placed(agreed) == [("x", "x", ["pool"])]


def test_one_tensor_with_two_quantizers():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            return self.b(x), self.c(x)

    model = bw.prepare(Fork(), image(), recipe={"rules": [{"match": "c", "input": "int8"}]})
    assert sorted(p for p in placed(model) if p[0] == "a") == [("a", "a", ["b"]), ("a", "a_for_c", ["c"])]
    bw.calibrate(model, [image()])
    x = image(3)
    with torch.no_grad():
        a = model.a(model.get_submodule("bitwright.quantizers.x")(x))
        expected = model.c(model.get_submodule("bitwright.quantizers.a_for_c")(a))
        end = model.get_submodule("bitwright.quantizers.c")
        assert torch.equal(model(x)[1], end(expected))


def test_a_rule_for_an_activation_speaks_of_the_fused_result():
    rules = [{"match": "block.1", "output": "int8 affine"}]
    model = bw.prepare(Small(), image(), recipe={"rules": rules})
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert entries["block.1"].verdict is Verdict.FUSED
    assert entries["block.1"].output == "int8 affine tensor"
    assert entries["block.2"].input == "int8 affine tensor"


def test_rules_by_class_and_by_node():
    recipe = {"rules": [{"match": "type:Sequential", "skip": True}, {"match": "node:add", "skip": True}]}
    model = bw.prepare(Small(), image(), recipe=recipe)
    floats = {n for n, v in verdicts(model).items() if v is Verdict.FLOAT}
    assert floats == {"block.0", "block.1", "block.2", "add", "mean"}
    model = bw.prepare(Small(), image(), recipe={"rules": [{"match": "type:Conv2d", "weight": {"bits": 3}}]})
    assert {n: s[0][:4] for n, s in specs(model).items() if s[0]} == {
        "block.0": "int3",
        "block.2": "int3",
        "other": "int3",
        "fc": "int7",
    }


def test_bits_mean_what_the_backend_has():
    model = bw.prepare(Small(), image(), recipe="W8A8")
    assert specs(model)["fc"][:2] == ("int7 symmetric narrow channel:0", "uint8 affine tensor")
    assert specs(bw.prepare(Small(), image(), "tensorrt", recipe="W8A8"))["fc"][0] == "int8 symmetric narrow channel:0"
    assert specs(bw.prepare(Small(), image(), "snpe", recipe="W4A8"))["fc"][0] == "uint4 affine tensor"


def test_fp8_and_groups():
    fp8 = bw.prepare(Small(), image(), recipe="FP8")
    assert specs(fp8)["fc"][:2] == ("e4m3 symmetric channel:0", "e4m3 symmetric tensor")
    bw.calibrate(fp8, [image()])
    wide = nn.Sequential(nn.Linear(256, 4), nn.ReLU())
    grouped = bw.prepare(wide, torch.randn(2, 256), recipe="W4A16_G128")
    bw.calibrate(grouped, [torch.randn(2, 256)])
    assert grouped.get_submodule("0").weight_quantizer.scale.shape == (4, 2)


# --------------------------------------------------------------------------------------- what cannot be, and force


def test_what_the_backend_cannot_do_may_stay_float():
    net = Small().eval()
    recipe = {"rules": [{"match": "block", "activation": "uint4"}, {"match": "fc", "weight": "int16"}]}
    with pytest.raises(ConfigError, match="the rule 'block': onnxruntime has no activations in uint4"):
        bw.prepare(net, image(), recipe=recipe)
    model = bw.prepare(net, image(), recipe=recipe, allow_float=True)
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert (entries["block.0"].verdict, entries["block.0"].reason) == (
        Verdict.FLOAT,
        "allowed to stay float: onnxruntime has no activations in uint4; it has int8, uint8",
    )
    assert entries["fc"].reason.startswith("allowed to stay float: onnxruntime has no weights in int16")
    assert (entries["fc"].asked, entries["fc"].weight) == (
        "weight int16 symmetric tensor, input uint8 affine tensor",
        "",
    )
    assert entries["other"].verdict is Verdict.INTEGER
    assert any("the rule 'fc' asks weight of fc (linear), but allowed to stay" in n for n in bw.ledger_of(model).notes)
    assert bw.ledger_of(model).recipe.allow_float
    assert bw.Recipe.parse(bw.ledger_of(model).recipe.to_dict()) == bw.ledger_of(model).recipe


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"match": "op:mean", "input": "uint8"},
            "asks input of mean (mean), but onnxruntime runs it in float; force: ",
        ),
        ({"match": "add", "weight": "int8"}, "the rule 'add' asks weight of add (add), but it has no weight"),
    ],
)
def test_a_rule_without_effect_is_refused(rule, message):
    with pytest.raises(ConfigError) as caught:
        bw.prepare(Small(), image(), recipe={"rules": [rule]})
    assert message in str(caught.value)
    bw.prepare(Small(), image(), recipe={"rules": [rule | {"optional": True}]})
    # One that a later rule overrules is no mistake.
    bw.prepare(Small(), image(), recipe={"rules": [rule, {"match": rule["match"], "skip": True}]})


def test_force():
    forced = bw.prepare(Small(), image(), "openvino", recipe={"rules": [{"match": "op:mean", "force": True}]})
    entry = next(e for e in bw.ledger_of(forced).entries if e.name == "mean")
    assert (entry.verdict, entry.reason) == (
        Verdict.INTEGER,
        "forced by the rule 'op:mean': openvino runs it in float",
    )
    assert ("add", "add", ["mean"]) in placed(forced)
    rule = {"match": "node:mean", "force": True, "output": "int8"}
    result = bw.prepare(Small(), image(), "academic", recipe={"weight": "int8", "activation": "uint8", "rules": [rule]})
    assert specs(result)["mean"] == ("", "", "int8 symmetric tensor")

    class Odd(nn.Module):
        def forward(self, x):
            return torch.erf(x) + 1.0

    odd = bw.prepare(Odd(), image(), recipe={"rules": [{"match": "op:erf", "force": True, "activation": "int8"}]})
    assert [t for t, _, _ in placed(odd)] == ["x"]
    bw.calibrate(odd, [image()])


def test_calls_of_one_layer_with_different_rules():
    model = bw.prepare(Twice(), image(), recipe={"rules": [{"match": "node:conv_1", "skip": True}]})
    first, _, second = bw.ledger_of(model).entries
    assert (first.verdict, second.verdict) == (Verdict.INTEGER, Verdict.FLOAT)
    assert second.reason == (
        "skipped by the rule 'node:conv_1', but its weight is quantized, as another call of it has it"
    )
    assert [t for t, _, _ in placed(model)] == ["x", "conv"]


def test_a_users_module_keeps_its_float_weight_where_that_is_asked():
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


# ----------------------------------------------------------------------------------------------------------- plan


def test_a_plan_says_what_prepare_would_do_and_changes_nothing():
    net = Small().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    recipe = {"backend": "openvino", "rules": [{"match": "fc", "skip": True}, {"match": "other", "weight": "int4"}]}
    plan = bw.plan(net, recipe, image())
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert type(net.fc) is nn.Linear
    prepared = bw.ledger_of(bw.prepare(net, image(), recipe=recipe))
    assert plan.entries == prepared.entries
    lines = str(plan).splitlines()
    assert lines[0] == "openvino: 4 integer, 1 fused, 2 float"
    assert lines[1].split() == ["name", "operator", "computes", "rule", "asked", "input", "weight", "output", "reason"]
    row = next(line for line in lines if line.startswith("other"))
    assert " ".join(row.split()) == (
        "other conv2d integer other weight int4 symmetric tensor, input uint8 affine tensor "
        "uint8 affine tensor int4 symmetric tensor uint8 affine tensor"
    )
    assert next(line for line in lines if line.startswith("fc")).endswith("skipped by the rule 'fc'")
    assert repr(plan) == str(plan)
    table = plan.__rich__()
    assert len(table.rows) == len(plan.entries)
    assert [c.header for c in table.columns] == lines[1].split()


def test_a_plan_of_a_preset_and_its_refusals():
    assert bw.plan(Small(), "W4A8", image()).entries[0].weight == "int4 symmetric narrow channel:0"
    assert bw.plan(Small(), None, image(), "snpe").ledger.backend.name == "snpe"
    with pytest.raises(ConfigError, match="plan needs example inputs to capture the model"):
        bw.plan(Small(), "W4A8")
    with pytest.raises(UnknownNameError, match="the rule 'fcc' matches no layer: did you mean 'fc'"):
        bw.plan(Small(), {"rules": [{"match": "fcc", "skip": True}]}, image())


def test_rules_may_name_what_simplifying_takes_away():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    prepared = bw.prepare(model, torch.randn(2, 4), skip=["1"])
    assert [e.verdict for e in bw.ledger_of(prepared).entries] == [Verdict.INTEGER, Verdict.INTEGER]
    with pytest.raises(UnknownNameError, match="the rule '3' matches no layer"):
        bw.prepare(model, torch.randn(2, 4), skip=["3"])


def test_index_arithmetic_is_not_quantized():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(10, 4), nn.Embedding(32, 4), nn.Linear(4, 3)

        def forward(self, tokens):
            mask = torch.ones(tokens.shape)
            places = (torch.cumsum(mask, 1) * mask).long() + 1
            return self.head(self.words(tokens) + self.places(places))

    tokens = torch.randint(0, 10, (2, 23))
    model = Placed().eval()
    prepared = bw.prepare(model, tokens)
    entries = {e.name: e for e in bw.ledger_of(prepared).entries}
    assert (entries["mul"].verdict, entries["mul"].reason) == (Verdict.FLOAT, "it computes indices")
    assert entries["add_1"].verdict is Verdict.INTEGER  # of floats that only become floats
    bw.calibrate(prepared, tokens)
    with torch.no_grad():
        expected = model(tokens)
        assert (prepared(tokens) - expected).pow(2).mean() < 1e-3 * expected.pow(2).mean()


def test_an_empty_tensor_is_not_quantized():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            cache = torch.zeros(x.shape[0], 0, 4)
            return self.head(torch.cat([cache, self.fc(x)], 1))

    model, x = Cached().eval(), torch.randn(2, 5, 4)
    prepared = bw.calibrate(bw.prepare(model, x), x)
    assert (prepared(x) - model(x)).abs().max() < 0.1


def test_padding_with_minus_infinity_before_a_max_pool(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(F.max_pool2d(F.pad(self.conv(x), (1, 1, 1, 1), value=float("-inf")), 3, 2))

    model, x = Pooled().eval(), torch.randn(2, 3, 9, 9)
    prepared = bw.calibrate(bw.prepare(model, x), x)
    with torch.no_grad():
        assert (prepared(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()
    path = bw.export(prepared, tmp_path / "padded.onnx")
    proof = bw.verify(prepared, path, x, runtimes=["onnxruntime"], latency=False).runtimes["onnxruntime"]
    assert proof.largest == 0
    assert proof.coverage == 1.0
