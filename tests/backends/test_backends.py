"""Backends as data: exact specs, where quantizers sit on the probe net, and that the specs hold through training."""

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS, TENSORRT, Backend, find_backend, load_backend, register_backend
from bitwright.backends.table import facts, page
from bitwright.errors import ConfigError, ExportError, UnknownNameError, VerifyError
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.backends.probe import Probe, images, probe

SHIPPED = [
    *("academic", "academic_nlp", "nnie", "onnx_qnn", "onnxruntime", "openvino", "pplcuda", "pplw8a16", "qdq"),
    *("snpe", "stpu", "tengine_u8", "tensorrt", "tensorrt_nlp", "virtual", "vitis"),
]
FIXED, LSQ, TQT, NNIE = "FixedFakeQuantize", "LearnableFakeQuantize", "TqtFakeQuantize", "NNIEFakeQuantize"
_POT = "int8 symmetric pot tensor"
MINMAX, EMA = "MinMaxObserver", "EMAMinMaxObserver"

# What tables of the old toolkit say, or for the CPU runtimes what was measured with them: weights, their observer and
# method, activations, their observer and method.
TABLE = {
    "academic": (None, MINMAX, LSQ, None, EMA, LSQ),
    "academic_nlp": (None, MINMAX, LSQ, None, EMA, LSQ),
    "nnie": ("int8 symmetric tensor", MINMAX, NNIE, "int8 symmetric tensor", EMA, NNIE),
    "onnx_qnn": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", MINMAX, LSQ),
    "onnxruntime": ("int7 symmetric narrow channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "openvino": ("int7 symmetric narrow channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "pplcuda": ("uint8 affine channel:0", MINMAX, LSQ, "uint8 affine tensor", MINMAX, LSQ),
    "pplw8a16": ("uint8 affine tensor", MINMAX, LSQ, "uint16 affine tensor", EMA, LSQ),
    "qdq": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "snpe": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", EMA, LSQ),
    "stpu": ("int8 symmetric narrow tensor", MINMAX, FIXED, "int8 symmetric narrow tensor", EMA, FIXED),
    "tengine_u8": ("uint8 affine tensor", MINMAX, LSQ, "uint8 affine tensor", EMA, LSQ),
    "tensorrt": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "tensorrt_nlp": ("int8 symmetric narrow channel:0", MINMAX, LSQ, "int8 symmetric narrow tensor", EMA, LSQ),
    "virtual": ("int8 symmetric channel:0", MINMAX, FIXED, "uint8 affine tensor", MINMAX, FIXED),
    "vitis": (_POT, "MinMaxFloorObserver", TQT, _POT, "PoTModeObserver", TQT),
}

# Tensors with a quantizer, by the names the old toolkit gave them on this net ("stem" is the stem's convolution with
# its BatchNorm and ReLU). It also had "pool" after "stem" and "up" after "layer1_r2": a max-pool and a nearest
# upsampling give values that are quantized already, so these two need none here, and what reads them reads the
# quantized "stem" and "layer1_r2". Where only "pool" or "up" was quantized, "stem" or "layer1_r2" is.
IMAGE = {
    *("x", "stem", "layer1_c1", "layer1_c2", "layer1_r2", "cat", "conv3", "mul", "deconv", "add_1", "sigmoid", "mul_1"),
    "flatten",
}
PLACED = {
    # Its deconvolution had a quantized weight and a float input: the input, "mul", is quantized now.
    "academic": {"x", "stem", "layer1_r1", "cat", "mul", "flatten"},
    "academic_nlp": {"flatten"},
    "tensorrt": IMAGE,
    "qdq": IMAGE,
    "nnie": IMAGE,
    "snpe": IMAGE | {"fc"},
    "pplw8a16": IMAGE | {"fc"},
    "pplcuda": IMAGE | {"fc"},
    "stpu": IMAGE | {"fc"},
    "tengine_u8": IMAGE | {"add", "fc"},
    "vitis": (IMAGE | {"add", "fc"}) - {"x", "sigmoid"},
    "onnx_qnn": IMAGE - {"mul", "sigmoid"},
    "tensorrt_nlp": {"stem", "layer1_c2", "layer1_r2", "deconv", "flatten"},
    # It took "cat" for transparent, so that conv3 had a quantized weight and a float input. Here "cat" is quantized,
    # its inputs with one scale, and the deconvolution's input, "mul", too.
    # The factor of `conv3(x) * 2` is part of the layer where the target folds it.
    "openvino": {"x", "stem", "layer1_c1", "layer1_c2", "layer1_r2", "cat", "conv3", "deconv", "mul_1", "flatten"},
    # Not in the old toolkit: all that onnxruntime has kernels for, and for simulation all arithmetic on two tensors.
    "onnxruntime": IMAGE - {"mul"},
    "virtual": IMAGE - {"conv3"},
}
# The old toolkit quantized the weights of every layer, whether its input was quantized or not, but for onnx_qnn's
# linear layer and deconvolution. Here both are, or neither.
LAYERS = {"stem", "layer1.c1", "layer1.c2", "conv3", "deconv", "fc"}
WEIGHTS = dict.fromkeys(SHIPPED, LAYERS) | {
    "academic_nlp": {"fc"},
    "tensorrt_nlp": {"fc"},
    "onnx_qnn": LAYERS - {"deconv", "fc"},
}


def options(name):
    """The papers' settings leave the specs to the user."""
    return {"recipe": {"weight": "int4 channel:0", "activation": "uint4"}} if name.startswith("academic") else {}


def prepared(name, **more):
    return bw.prepare(probe(), images(), name, **options(name), **more)


def old_names(model, fused):
    """Quantized tensors under the old toolkit's names, in which a layer, its BatchNorm and its ReLU are one."""
    layers = {"relu": "stem", "layer1_r1": "layer1_c1", "drelu": "deconv", "layer1_b2": "layer1_c2", "avg": "flatten"}
    if not fused:
        layers.pop("layer1_r1")
    found = [n.args[0].name for n in model.graph.nodes if _is_quantizer(model, n)]
    assert len(found) == len(set(found))
    return {layers.get(name, name) for name in found}


def _is_quantizer(model, node):
    return node.op == "call_module" and isinstance(model.get_submodule(node.target), bw.TensorQuantizer)


def test_all_backends_are_there():
    assert set(SHIPPED) <= set(BACKENDS)


@pytest.mark.parametrize("name", SHIPPED)
def test_specs_observers_and_methods(name):
    backend = BACKENDS.get(name)
    found = (
        None if backend.weight is None else str(backend.weight),
        backend.weight_observer,
        backend.weight_method or backend.method,
        None if backend.activation is None else str(backend.activation),
        backend.observer,
        backend.method,
    )
    assert found == TABLE[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_quantizers_sit_exactly_where_the_table_says(name):
    model = prepared(name)
    assert old_names(model, fused=name != "academic") == PLACED[name]
    weights = {n.removesuffix("._weight_quantizer") for n in quantizers(model) if n.endswith("._weight_quantizer")}
    assert weights == WEIGHTS[name]
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert {n for n in LAYERS if entries[n].verdict is Verdict.INTEGER} == WEIGHTS[name]
    assert {n for n in LAYERS if entries[n].weight} == WEIGHTS[name]
    assert {n: v.verdict for n, v in entries.items() if n in ("pool", "up", "flatten")} == dict.fromkeys(
        ("pool", "up", "flatten"), Verdict.CARRIED
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_every_quantizer_has_the_backends_spec(name):
    model, backend = prepared(name), BACKENDS.get(name)
    for path, quantizer in quantizers(model).items():
        weight = path.endswith("._weight_quantizer")
        spec = (backend.weight if weight else backend.activation) or quantizer.spec
        if weight and path.startswith("deconv"):
            assert quantizer.spec.format == spec.format
            assert str(quantizer.spec.granularity) in ("tensor", "channel:1")
            continue
        assert quantizer.spec == spec, path
        assert (quantizer.observer_name, quantizer.method_name) == (TABLE[name][1:3] if weight else TABLE[name][4:6]), (
            path
        )


@pytest.mark.parametrize("name", SHIPPED)
def test_specs_hold_from_calibration_to_evaluation(name):
    """Range, zero point, power of two and grid, before training, while training and after."""
    model = prepared(name)
    net, x = probe(), images(4)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))  # off: exact
    seen = {}
    for path, quantizer in quantizers(model).items():
        quantizer.register_forward_hook(
            lambda q, _, out, path=path: seen.setdefault(path, []).append((q, out.detach()))
        )
    bw.calibrate(model, [images(4, seed=s) for s in (2, 3)], progress=False)
    seen.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        check_grids(seen)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.fc.parameters())
    model.eval()
    with torch.no_grad():
        first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    check_grids(seen)
    used = {p for p in quantizers(model) if not p.endswith("._weight_quantizer")}
    assert used | {f"{w}._weight_quantizer" for w in WEIGHTS[name]} == set(quantizers(model))


def check_grids(seen):
    assert seen
    for path, calls in seen.items():
        for quantizer, out in calls:
            spec = quantizer.spec
            if quantizer.method_name == NNIE:
                magnitude = out[out != 0].abs().double()
                powers = 16 * torch.log2(magnitude)
                assert (powers - powers.round()).abs().max() < 1e-3, path  # a logarithmic grid, 16 steps an octave
                assert powers.round().max() - powers.round().min() <= 127, path
                continue
            # The optimizer may have moved the scale since; take the grid from the values where it learns.
            assert len(out.unique()) <= (spec.qmax - spec.qmin + 1) * quantizer.scale.numel(), path
            scale, zero_point = (p.detach().double() for p in quantizer.qparams())
            assert (scale > 0).all(), path
            if spec.symmetric:
                assert (zero_point == 0).all(), path
            assert ((zero_point >= spec.qmin) & (zero_point <= spec.qmax)).all(), path
            if spec.power_of_two:
                assert torch.equal(torch.log2(scale), torch.log2(scale).round()), path
    # Once more with the scales in force: every value lies on the grid, inside the range.
    for path, calls in seen.items():
        quantizer, out = calls[-1]
        if quantizer.method_name == NNIE:
            continue
        again = quantizer(out.clone()).detach()
        scale, zero_point = (p.detach().double() for p in quantizer.qparams())
        shape = [-1 if d == quantizer.method.axis else 1 for d in range(out.ndim)] if scale.ndim else []
        steps = again.double() / scale.reshape(shape) + zero_point.reshape(shape)
        assert (steps - steps.round()).abs().max() < 0.01, path
        assert steps.round().min() >= quantizer.spec.qmin, path
        assert steps.round().max() <= quantizer.spec.qmax, path
    seen.clear()


# --------------------------------------------------------------------------------------------- rules of backends


def test_first_and_last_layers_have_eight_bits_unless_a_rule_says_otherwise():
    model = prepared("academic")
    bits = {n: model.get_submodule(n).weight_quantizer.spec.bits for n in LAYERS}
    assert bits == dict.fromkeys(LAYERS, 4) | {"stem": 8, "fc": 8}
    inputs = {n: model.get_submodule(n).input_quantizer.spec.bits for n in LAYERS}
    assert inputs == dict.fromkeys(LAYERS, 4) | {"stem": 8, "fc": 8}
    recipe = options("academic")["recipe"] | {"rules": [{"match": "fc", "weight": {"bits": 2}}]}
    model = bw.prepare(probe(), images(), "academic", recipe=recipe)
    assert (model.fc.weight_quantizer.spec.bits, model.fc.input_quantizer.spec.bits) == (2, 8)


def test_ends_are_found_behind_operators_with_one_input():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Conv2d(3, 3, 1) for _ in range(4))
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            x = (x - 0.5) / 0.25
            y = self.b(self.a(x) + self.d(x))
            return torch.softmax(self.fc(y.mean((2, 3))), -1), torch.relu(self.c(y))

    model = bw.prepare(Net(), torch.randn(2, 3, 4, 4), recipe="W4A4")
    bits = {n: model.get_submodule(n).weight_quantizer.spec.bits for n in "abcd"}
    assert bits == {"a": 8, "d": 8, "b": 4, "c": 8}
    assert model.fc.weight_quantizer.spec.bits == 8


def test_academic_needs_specs_and_takes_them_in_every_way():
    message = r"the backend academic leaves the specs to you: give weight and activation \('int4 channel:0'"
    with pytest.raises(ConfigError, match=message):
        bw.prepare(probe(), images(), "academic")
    with pytest.raises(ConfigError, match=r"leaves the specs to you: give activation \("):
        bw.prepare(probe(), images(), "Academic", weight="int4")
    with pytest.raises(ConfigError, match="the backend academic_nlp leaves"):
        bw.swap_modules(probe(), backend="academic_nlp")
    for more, weight, activation in (
        ({"weight": "int4", "activation": "float"}, "int4 symmetric tensor", ""),
        ({"recipe": "W2A4"}, "int2 symmetric channel:0", "uint4 affine tensor"),
        ({"weight": "int4 narrow", "activation": "uint3"}, "int4 symmetric narrow tensor", "uint3 affine tensor"),
    ):
        ledger = bw.ledger_of(bw.prepare(probe(), images(), "academic", **more))
        (entry,) = (e for e in ledger.entries if e.name == "conv3")
        assert (entry.weight, entry.input) == (weight, activation)


def test_papers_keep_batchnorm_apart_and_bias_float():
    model = prepared("academic")
    assert model.stem.folded_norm is None
    entry = next(e for e in bw.ledger_of(model).entries if e.name == "bn")
    assert (entry.verdict, entry.reason) == (Verdict.FLOAT, "it is kept as it is, not multiplied into weights")
    bw.calibrate(model, [images()], progress=False)
    assert model.conv3.bias_scale() is None
    folded = prepared("tensorrt")
    assert folded.stem.folded_norm is folded.bn
    bw.calibrate(folded, [images()], progress=False)
    assert folded.conv3.bias_scale() is not None


def test_tensors_after_relu_are_unsigned_on_cpus():
    model = prepared("openvino")
    bw.calibrate(model, [images()], progress=False)
    for name in ("relu", "layer1_r1", "drelu"):
        quantizer = model.get_submodule(f"bitwright.quantizers.{name}")
        assert (int(quantizer.zero_point), quantizer.spec.qmin, quantizer.spec.qmax) == (0, 0, 255)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(4, 8)
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens, mask):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        scores = torch.matmul(self.q(x), self.k(x).transpose(1, 2))
        x = x + torch.matmul(torch.softmax(scores / 2.0 + mask, -1), x)
        return self.out(x)


def test_transformers_on_tensorrt():
    inputs = (torch.randint(0, 10, (2, 4)), torch.zeros(4, 4))
    model = bw.prepare(Embedded(), inputs, "tensorrt_nlp")
    entries = {e.name: e for e in bw.ledger_of(model).entries}
    assert (entries["add"].verdict, entries["add"].reason) == (Verdict.FLOAT, "an embedding goes in")
    assert (entries["add_1"].operator, entries["add_1"].verdict) == ("add_mask", Verdict.FLOAT)  # -1e9 spoils a scale
    assert entries["add_2"].verdict is Verdict.INTEGER
    placed = {n.args[0].name for n in model.graph.nodes if _is_quantizer(model, n)}
    assert placed == {"add", "q", "k", "softmax", "matmul_1", "add_2"}
    bw.calibrate(model, [inputs], progress=False)


def test_backends_for_transformers_see_the_products_of_fused_attention():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    x = torch.randn(2, 5, 8)
    recipe = {"weight": "int8 channel:0", "activation": "int8"}
    found = {}
    for name in ("tensorrt_nlp", "academic_nlp", "tensorrt"):
        model = bw.prepare(Attending(), x, name, recipe=recipe)
        found[name] = Counter(e.operator for e in bw.ledger_of(model).entries if e.verdict is Verdict.INTEGER)
    assert found["tensorrt_nlp"] == found["academic_nlp"] == {"linear": 1, "matmul": 2}
    assert found["tensorrt"] == {"linear": 1}
    switched = bw.prepare(
        Attending(), x, "tensorrt_nlp", recipe={**recipe, "schedules": {"decompose_attention": False}}
    )
    assert "scaled_dot_product_attention" in {e.operator for e in bw.ledger_of(switched).entries}


def test_no_quantizer_between_a_product_and_a_sum():
    class Scaled(nn.Module):
        def forward(self, x, y):
            return x * y + y

    tensors = {}
    for name in ("tensorrt", "tengine_u8"):
        model = bw.prepare(Scaled(), (torch.randn(2, 3), torch.randn(2, 3)), name)
        tensors[name] = {n.args[0].name for n in model.graph.nodes if _is_quantizer(model, n)}
    assert tensors == {"tensorrt": {"x", "y"}, "tengine_u8": {"x", "y", "mul", "add"}}


# ------------------------------------------------------------------------------------------------ names and files


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *[("Tensorrt", "tensorrt"), ("SNPE", "snpe"), ("ONNX_QNN", "onnx_qnn"), ("onnx-qnn", "onnx_qnn")],
        *[("PPLW8A16", "pplw8a16"), ("PPLCUDA", "pplcuda"), ("OPENVINO", "openvino"), ("Vitis", "vitis")],
        *[("Tengine_u8", "tengine_u8"), ("Tensorrt_NLP", "tensorrt_nlp"), ("Academic_NLP", "academic_nlp")],
        *[("NNIE", "nnie"), ("STPU", "stpu"), ("QDQ", "qdq"), ("Academic", "academic"), ("VIRTUAL", "virtual")],
    ],
)
def test_old_spellings(spelling, name):
    assert find_backend(spelling) is BACKENDS.get(name)


def test_misspelt_names():
    with pytest.raises(UnknownNameError, match="unknown backend 'Tensort': did you mean 'tensorrt'"):
        bw.prepare(probe(), images(), "Tensort")
    with pytest.raises(ConfigError, match="backend must be a name or a Backend, not 3"):
        find_backend(3)


def test_a_backend_in_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: tensorrt\nname: mine\ntitle: my chip\nweight: int4 narrow tensor\nactivation: int8\n"
        "integer: {conv2d: both, linear: true, add: inputs}\nfused: [relu]\nmerged: {add: [mul]}\n"
    )
    mine = load_backend(path)
    assert mine == find_backend(path) == find_backend(str(path)) == Backend.parse(path)
    assert mine.integer == {"conv2d": "both", "linear": "both", "add": "inputs"}
    assert (mine.observer, mine.fused, mine.merged) == (EMA, frozenset({"relu"}), {"add": frozenset({"mul"})})
    model = bw.prepare(probe(), images(), str(path))
    assert bw.ledger_of(model).backend == mine
    assert str(model.conv3.weight_quantizer.spec) == "int4 symmetric narrow tensor"
    recipe = bw.Recipe(backend=str(path))
    assert bw.ledger_of(bw.prepare(probe(), images(), recipe=recipe)).backend == mine
    assert bw.ledger_of(model).recipe.backend == str(path)
    document = tmp_path / "mine.json"
    document.write_text(json.dumps({"base": "mine.yaml", "name": "other"}))
    with pytest.raises(ConfigError, match=r"the backend 'mine.yaml' cannot be read"):
        load_backend(document)


def test_all_mistakes_of_a_backend_are_named_at_once(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ntitlee: my chip\nweight: int\nactivation: int8\nobserver: minmx\nmethod: LQS\nfused: [rleu]\n"
        "integer: {conv: inputs, linear: inputz}\nweight_grains: [chanel]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_backend(path)
    text = str(caught.value)
    assert text.startswith(f"the backend {str(path)!r} has 9 mistakes: ")
    for expected in (
        "title: Field required",
        "titlee: is unknown: did you mean 'title'",
        "weight: unknown number format 'int': did you mean",
        "observer: unknown observer 'minmx': did you mean 'minmax'",
        "method: unknown method 'LQS': did you mean 'lsq'",
        "unknown operator 'rleu': did you mean 'relu'",
        "unknown operator 'conv': did you mean 'conv",
        "integer.linear: Input should be 'inputs', 'outputs' or 'both', not 'inputz'",
        "weight_grains.0: Input should be 'tensor', 'channel' or 'group', not 'chanel'",
    ):
        assert expected in text
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"mine.yaml' must be a mapping of settings, not list"):
        load_backend(path)


def test_a_backend_of_ones_own_in_python():
    mine = register_backend()(replace(TENSORRT, name="MyChip", title="mine", integer={"linear": "both"}))
    try:
        assert find_backend("mychip") is mine
        model = bw.prepare(probe(), images(), "mychip")
        assert old_names(model, fused=True) == {"flatten", "fc"}
        with pytest.raises(ConfigError, match="backend 'MyChip' is registered twice"):
            register_backend()(mine)
    finally:
        BACKENDS.unregister("MyChip")


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("tensorrt", {"activation": "uint8"}, "tensorrt has no activations in uint8; it has int8"),
        ("tensorrt", {"recipe": "W4A4"}, "the recipe: tensorrt has no activations in int4; it has int8"),
        ("snpe", {"weight": "uint8 channel:0"}, "snpe has no scales per channel for weights .* it has them per tensor"),
        ("snpe", {"weight": "uint8 symmetric"}, "snpe needs affine weights, not 'uint8 symmetric tensor'"),
        ("vitis", {"weight": "int8"}, "vitis needs scales that are powers of two"),
        ("stpu", {"activation": "int8 affine"}, "stpu needs symmetric activations, not 'int8 affine tensor'"),
        ("nnie", {"weight": "int4"}, "nnie has no weights in int4; it has int8"),
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
        "activation": {"observer": EMA, "observer_options": {"ema_ratio": 0.5}},
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


# ------------------------------------------------------------------------------------------ export and verify


def exported(name, tmp_path, **more):
    model = prepared(name, **more)
    bw.calibrate(model, [images()], progress=False)
    return model, bw.export(model, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["tensorrt", "onnx_qnn"])
def test_q_dq_files_run_in_onnxruntime_as_simulated(name, tmp_path):
    model, file = exported(name, tmp_path)
    proof = bw.verify(model, file, [images(seed=5)], latency=False, progress=False)
    (found,) = proof.runtimes.values()
    assert (found.runtime, found.largest) == ("onnxruntime", 0)
    assert max(o.relative for o in found.outputs) < 1e-5


def test_sixteen_bit_activations_are_written_as_such(tmp_path):
    import onnx

    model, file = exported("pplw8a16", tmp_path)
    kinds = {i.name: i.data_type for i in onnx.load(file).graph.initializer}
    assert onnx.TensorProto.UINT16 in {*kinds.values(), *_constant_types(file)}
    with pytest.raises(VerifyError, match="no runtime on this machine executes files for pplw8a16"):
        bw.verify(model, file, [images()])


def _constant_types(file):
    import onnx

    nodes = onnx.load(file).graph.node
    return {a.i for n in nodes if n.op_type == "Cast" for a in n.attribute if a.name == "to"}


def test_a_logarithmic_grid_cannot_be_exported(tmp_path):
    with pytest.raises(ExportError, match=r"the method 'NNIEFakeQuantize' .* has no uniform grid"):
        exported("nnie", tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ documentation


def test_facts_name_specs_limits_and_defaults():
    found = dict(facts(BACKENDS.get("vitis")))
    assert found["weights"] == "int8 symmetric pot tensor (MinMaxFloorObserver, TqtFakeQuantize)"
    assert found["scales"] == "powers of two"
    assert found["bias"] == "float"
    assert found["activations can be"] == "int8; symmetric; one scale per tensor"
    assert "scales" not in dict(facts(BACKENDS.get("snpe")))
    assert dict(facts(BACKENDS.get("tensorrt_nlp")))["no quantizer between"] == "div and add, mul and add"
    assert dict(facts(BACKENDS.get("academic")))["first and last layers"] == "8 bits"


def test_the_page_on_backends_is_current():
    made = page([BACKENDS.get(name) for name in SHIPPED])
    published = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
    assert published.read_text() == made, "run: bitwright backends matrix -o docs/reference/backends.md"
    rows = {line.split(" | ")[0]: line.split(" | ") for line in made.splitlines() if line.startswith("| `")}
    column = 1 + SHIPPED.index("snpe")
    assert rows["| `conv2d`"][column] == "in, out"
    assert rows["| `max_pool2d`"][column] == "moves"
    assert rows["| `interpolate`"][column] == "moves / in, out"
    assert rows["| `relu`"][column] == "fused"
    assert rows["| `uint8`"][column] == "WA"
    assert rows["| `int8`"][column].strip() == ""


def test_probe_is_the_net_that_was_measured():
    names = {type(m).__name__ for m in Probe().modules()}
    assert {"ConvTranspose2d", "Upsample", "MaxPool2d", "AdaptiveAvgPool2d", "Linear", "BatchNorm2d"} <= names
