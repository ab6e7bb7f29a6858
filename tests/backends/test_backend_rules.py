"""Rules of backends: ends, folding, biases, what is merged, and transformers."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.preparation import Verdict
from tests.backends.probe import LAYERS, images, is_quantizer, options, prepared, probe


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
    folded = prepared("qdq")
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
    placed = {n.args[0].name for n in model.graph.nodes if is_quantizer(model, n)}
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
    wide, narrow = {**recipe, "activation": "uint8"}, {"weight": "int7 channel:0"}
    asked = {"tensorrt_nlp": recipe, "academic_nlp": recipe, "tensorrt": recipe, "openvino": wide}
    for name, given in (*asked.items(), ("openvino, any CPU", narrow)):
        model = bw.prepare(Attending(), x, name.partition(",")[0], recipe=given)
        found[name] = Counter(e.operator for e in bw.ledger_of(model).entries if e.verdict is Verdict.INTEGER)
        inputs = {e.input for e in bw.ledger_of(model).entries if e.operator == "matmul"}
        if name == "openvino":  # it multiplies without zero points only
            assert inputs == {"int8 symmetric tensor", "uint8 symmetric tensor, int8 symmetric tensor"}
    assert found["tensorrt_nlp"] == found["academic_nlp"] == found["openvino"] == {"linear": 1, "matmul": 2}
    assert found["tensorrt"] == found["openvino, any CPU"] == {"linear": 1}
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
        tensors[name] = {n.args[0].name for n in model.graph.nodes if is_quantizer(model, n)}
    assert tensors == {"tensorrt": {"x", "y"}, "tengine_u8": {"x", "y", "mul", "add"}}
