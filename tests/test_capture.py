"""Capture: Python that looks at shapes, types and containers is traced; what cannot be becomes an island."""

import copy
import dataclasses
import math
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import BitwrightError, CaptureError, ConfigError
from bitwright.graph import CapturedModel, capture
from bitwright.nn import QuantConv2d, QuantLinear
from bitwright.prepare import Verdict
from bitwright.quantizer import quantizers


class Net(nn.Module):
    """A convolution, and a forward given as a function of (self, x, …)."""

    def __init__(self, body, **parts):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.body = body
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def image(batch=2, size=8):
    return torch.randn(batch, 3, size, size)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def prepared(model, example, *others):
    """Prepare, check that original and copy agree on all inputs, and that nothing is an island."""
    model = model.eval()
    quantized = bw.prepare(model, example)
    assert bw.ledger_of(quantized).islands == {}
    assert isinstance(quantized, CapturedModel)
    for inputs in (example, *others):
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        keywords = {}
        if isinstance(inputs, dict):
            given, keywords = (), inputs
        with torch.no_grad():
            expected = model(*copy.deepcopy(given), **copy.deepcopy(keywords))
            assert same(quantized(*copy.deepcopy(given), **copy.deepcopy(keywords)), expected)
    return quantized


# -------------------------------------------------------------------------------- Python that looks at tensors


def by_shape(self, x):
    x = self.conv(x)
    if x.shape[1] == 4 and x.dim() == 4:
        x = x * 2
    if x.size(2) > 100:
        raise ValueError("too large")
    b, c, h, w = x.shape
    assert c == 4
    return x.view(b, c * h, w)


def by_length(self, x):
    x = self.conv(x)
    total = 0
    for i in range(len(x.shape)):
        total = total + x.shape[i] * 0 + i
    return x + total


def by_iteration(self, x):
    parts = [self.conv(t[None]) for t in x]
    return torch.cat(parts) + len(parts)


def by_type(self, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError("a tensor, please")
    x = self.conv(x)
    assert torch.is_tensor(x)
    assert isinstance(x.shape, tuple)
    assert isinstance(x.shape[0], int)
    return x if x.dtype == torch.float32 and x.is_floating_point() else x.float()


def by_unpacking(self, x):
    b, _, h, w = self.conv(x).size()
    *rest, last = x.shape
    return self.conv(x).reshape(b, 4, h * w)[:, :, : last // 2] * (len(rest) - 2)


def by_arange(self, x):
    x = self.conv(x)
    places = torch.arange(x.shape[3], device=x.device, dtype=x.dtype)
    return x + places + torch.zeros(x.shape[0], 1, 1, 1) + torch.ones(x.size()) + x.new_full((x.shape[0], 1, 1, 1), 2)


def by_buffer(self, x):
    x = self.conv(x)
    return x + self.table[: x.shape[2], : x.shape[3]] + self.table[0, 0]


def by_split(self, x):
    a, b = self.conv(x).chunk(2, dim=1)
    c, (d, e) = a, b.split(1, 1)
    return c + torch.cat([d, e], 1)


def by_arithmetic(self, x):
    h, w = x.shape[-2:]
    x = F.pad(self.conv(x), (0, (4 - w % 4) % 4, 0, (4 - h % 4) % 4))
    return F.interpolate(x, size=(int(h * 1.5), max(w, 3))) / x.numel() ** 0.5


def by_math(self, x):
    x = self.conv(x)
    return x * x.shape[1] ** -0.5 + x.ndim + x.stride(0) * 0 + x.nelement() * 0


def by_dict(self, x):
    found = {"a": self.conv(x), "b": x}
    for key, value in found.items():
        found[key] = value.mean(1)
    return found["a"] + found["b"]


def by_zip(self, x):
    x = self.conv(x)
    y = [a * i for i, a in enumerate(x.unbind(1))]
    return torch.stack([a + b for a, b in zip(y, x.unbind(1), strict=True)], 1)


def by_attribute(self, x):
    x = self.conv(x)
    return x.mT + x.data.abs() + x.grad_fn.__class__.__name__.count("zzz")


def by_condition(self, x):
    x = self.conv(x)
    y = x if x.shape[0] > 0 and not self.training else x * 5
    return y.to(x.dtype).to(x.device).type_as(x)


def by_reverse(self, x):
    x = self.conv(x)
    return sum(reversed(list(x.unbind(1)))) + 1


def by_string(self, x):
    assert "cuda" not in str(x.device)
    assert f"{x.shape[1]:02d} {x.shape[2]}" == "03 8"
    return self.conv(x) if f"{x.ndim}d" == "4d" and str(x.shape[1]) == "3" else x


def by_key(self, x):
    return self.conv(x) * {3: 1.0, 4: 2.0}[x.shape[1]] + (x.shape[2] in {8, 9}) * 1.0


def by_rounding(self, x):
    half, rest = divmod(x.shape[2], 2)
    size = (round(x.shape[2] * 0.7), math.ceil(x.shape[3] / 3) + abs(rest - half))
    return F.adaptive_avg_pool2d(self.conv(x), size)


def by_conversion(self, x):
    x = self.conv(x.half().to(torch.float32)).double().float()
    return self.conv(x[:, :3].to(x.dtype)) + self.conv(x[:, 1:].type(torch.float32))


BODIES = [
    by_shape,
    by_length,
    by_type,
    by_unpacking,
    by_arange,
    by_split,
    by_arithmetic,
    by_math,
    by_dict,
    by_zip,
    by_attribute,
    by_condition,
    by_reverse,
    by_string,
    by_key,
    by_rounding,
    by_conversion,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_python_that_looks_at_tensors(body):
    quantized = prepared(Net(body), image(2), image(3), image(1))
    assert {e.verdict for e in bw.ledger_of(quantized).entries if e.name == "conv"} == {Verdict.INTEGER}


@pytest.mark.parametrize("body", [by_arange, by_unpacking, by_shape], ids=lambda f: f.__name__)
def test_sizes_stay_free(body):
    prepared(Net(body), image(2, 8), image(2, 12), image(1, 10))


def test_numbers_that_python_needs_are_decisions():
    quantized = prepared(Net(by_arithmetic), image(2, 8))
    assert {d.reader for d in bw.ledger_of(quantized).decisions} == {"int()", "if"}


def test_a_buffer_indexed_by_sizes():
    model = Net(by_buffer, table=torch.randn(16, 16))
    quantized = prepared(model, image(2, 8), image(3, 12), image(1, 16))
    assert "table" in quantized.state_dict()


def test_iterating_over_a_batch_is_a_decision():
    quantized = prepared(Net(by_iteration), image(2), image(2))
    decisions = bw.ledger_of(quantized).decisions
    assert [(d.reader, d.where.rsplit(":", 1)[0].rsplit("/", 1)[-1]) for d in decisions][:1] == [
        ("for", "test_capture.py")
    ]


def test_decisions_name_the_line():
    def body(self, x):
        if x.shape[0] > 1:
            return self.conv(x)
        return self.conv(x) * 2

    quantized = prepared(Net(body), image(2))
    (decision,) = bw.ledger_of(quantized).decisions
    line = body.__code__.co_firstlineno + 1
    assert decision.reader == "if"
    assert decision.where == f"{__file__}:{line}"


# ------------------------------------------------------------------------------------------ inputs and outputs

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    size: int = 0


class Output(OrderedDict):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


def test_keyword_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, image, other, scale=1.0, mask=None):
            out = self.conv(image) * scale - other.mean()
            return out if mask is None else out * mask

    x, y = image(), image()
    quantized = prepared(Two(), {"image": x, "other": y}, {"image": image(3), "other": y})
    assert [n.target for n in quantized.graph.nodes if n.op == "placeholder"] == ["image", "other"]
    assert torch.equal(quantized(x, y), quantized(other=y, image=x))
    prepared(Two(), (x, y, 2.0), (image(1), y, 2.0))
    prepared(Two(), (x, y, 2.0, None))
    prepared(Two(), {"other": y, "image": x, "mask": torch.ones(8)})


def test_numbers_and_none_are_part_of_the_program():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, scale=1.0, mask=None, mode="plain"):
            x = self.fc(x) * scale
            return (x if mask is None else x * mask) if mode == "plain" else -x

    x = torch.randn(2, 3)
    quantized = prepared(Scaled(), (x, 2.0, None, "plain"))
    assert [e.name for e in bw.ledger_of(quantized).entries] == ["fc", "mul"]
    for given, message in (
        ((x, 3.0, None, "plain"), "the input 'scale' must be 2.0, with which the model was captured, not 3.0"),
        ((x, 2.0, torch.ones(3), "plain"), "the input 'mask' must be None, .* not tensor"),
        ((x, 2.0, None, "other"), "the input 'mode' must be 'plain', .* not 'other'"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantized(*given)


def test_builtin_names_as_inputs():
    class Shadow(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, input, filter):
            return self.fc(input) + filter

    prepared(Shadow(), {"input": torch.randn(2, 3), "filter": torch.randn(2, 2)})


def test_variable_inputs():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, first, *rest, **named):
            out = self.fc(first)
            for value in rest:
                out = out + self.fc(value)
            for key in named:
                out = out * named[key]
            return out

    x = torch.randn(2, 3)
    model = Many().eval()
    quantized = bw.prepare(model, (x, x + 1, x + 2))
    assert torch.equal(quantized(x, x - 1, x), model(x, x - 1, x))
    quantized = bw.prepare(model, {"first": x, "scale": torch.tensor(2.0)})
    assert torch.equal(quantized(first=x, scale=torch.tensor(3.0)), model(x, scale=torch.tensor(3.0)))


def test_nested_inputs():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, batch, pair):
            first, (second, third) = pair
            out = self.fc(batch["x"]) + self.fc(first) - second
            if "y" in batch:
                out = out * batch["y"]
            return out + sum(third)

    def inputs(n):
        x = torch.randn(n, 3)
        return ({"x": x, "y": torch.randn(n, 2)}, (x, (torch.randn(n, 2), [torch.ones(2), torch.ones(2)])))

    prepared(Nested(), inputs(2), inputs(3))


@pytest.mark.parametrize(
    "body",
    [
        lambda self, x: (self.conv(x), x.shape[0]),
        lambda self, x: [self.conv(x), (x, x.mean())],
        lambda self, x: {"out": self.conv(x), "aux": {"size": x.shape[-1], "none": None}},
        lambda self, x: Pair(self.conv(x), x),
        lambda self, x: (self.conv(x), None, 3, "text"),
        lambda self, x: OrderedDict(out=self.conv(x)),
        lambda self, x: Output(out=self.conv(x), more=(x,)),
        lambda self, x: Result(self.conv(x), x.shape[0]),
    ],
)
def test_outputs_of_any_shape(body):
    model, x = Net(body), image()
    quantized = prepared(model, x, image(3))
    assert type(quantized(x)) is type(model(x))
    assert {e.operator for e in bw.ledger_of(quantized).entries} <= {"conv2d", "mean"}


def test_no_batch_dimension():
    prepared(Net(lambda self, x: self.conv(x)), torch.randn(3, 8, 8))


# ------------------------------------------------------------------------------------------ sharing and in-place


def test_a_module_called_twice():
    quantized = prepared(Net(lambda self, x: self.conv(x) + self.conv(x.flip(3))), image(), image(3))
    calls = [n for n in quantized.graph.nodes if n.target == "conv"]
    assert len(calls) == 2


def test_a_module_under_two_names_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = self.one
            self.three = nn.Linear(4, 4)
            self.three.weight = self.one.weight

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    model = Tied().eval()
    quantized = prepared(model, torch.randn(2, 4), torch.randn(5, 4))
    assert quantized.three.weight is quantized.one.weight
    assert quantized.two is quantized.one
    assert set(model.state_dict()) <= set(quantized.state_dict())
    quantized.load_state_dict(model.state_dict())


def add_in_place(self, x):
    out = self.conv(x)
    identity = out
    out = torch.relu_(out * 2)
    out += identity
    return out


def relu_in_place(self, x):
    out = self.conv(x)
    F.relu_(out)
    return out + 1


def method_in_place(self, x):
    out = self.conv(x)
    out.mul_(2).add_(1)
    out.clamp_(-0.5, 0.5)
    return out


def view_written(self, x):
    out = self.conv(x)
    out.view(-1).add_(1)
    return out


def view_of_view_written(self, x):
    out = self.conv(x)
    flat = out.view(-1)
    part = flat[: flat.shape[0] // 2]
    part.mul_(3)
    return out


def slice_written(self, x):
    out = self.conv(x)
    out[:, 0] = 1.0
    out[:, 1].mul_(2.0)
    return out


def base_written(self, x):
    out = self.conv(x)
    view = out[:, :2]
    out.relu_()
    return view * 2 + out[:, 2:]


def transposed_written(self, x):
    out = self.conv(x)
    out.mT.mul_(2)
    return out


def input_written(self, x):
    x.mul_(2)
    return self.conv(x)


def input_view_written(self, x):
    x[:, 0].mul_(2)
    return self.conv(x)


def shared_residual(self, x):
    out = self.conv(x)
    skip = out
    out += 1
    return out * skip


def half_in_place(self, x):
    out = self.conv(x).half()
    out.add_(torch.ones(8))
    return out


def integers_in_place(self, x):
    count = torch.zeros(x.shape[0], dtype=torch.int64)
    count += 1
    return self.conv(x) + count.view(-1, 1, 1, 1)


def keeps_no_gradient(self, x):
    out = self.conv(x)
    return out.requires_grad_(False) + out.detach_()


def filled(self, x):
    out = self.conv(x)
    out.masked_fill_(out > 0.5, 0.25)
    return out.fill_(1.0) + 2 if x.ndim == 3 else out


IN_PLACE = [
    add_in_place,
    relu_in_place,
    method_in_place,
    view_written,
    view_of_view_written,
    slice_written,
    base_written,
    transposed_written,
    input_written,
    input_view_written,
    shared_residual,
    half_in_place,
    integers_in_place,
    keeps_no_gradient,
    filled,
]


@pytest.mark.parametrize("body", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place_operations(body):
    quantized = prepared(Net(body), image(2), image(3))
    assert any(n.target == "conv" for n in quantized.graph.nodes)


@pytest.mark.parametrize("body", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place_operations_when_quantized(body):
    model = Net(body).eval()
    quantized = bw.prepare(model, image())
    x = image(4)
    if quantizers(quantized):
        bw.calibrate(quantized, [x.clone()])
    else:  # what is written to through a view is not quantized
        (entry,) = [e for e in bw.ledger_of(quantized).entries if e.name == "conv"]
        assert entry.reason == "it shares memory with a tensor that is written to in place"
    with torch.no_grad():
        expected, got = model(x.clone()).float(), quantized(x.clone()).float()
    noise = (expected - got).pow(2).mean()
    assert float(noise) < 0.01 * float(expected.pow(2).mean())


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_write_between_producer_and_consumer_is_not_lost(backend):
    def body(self, x):
        smooth = F.gelu(self.conv(x))  # stays float, so that only the second convolution wants it quantized
        smooth[:, 0] = 5.0
        smooth.flatten(1)[:, 5:40].mul_(-3.0)
        return self.second(F.max_pool2d(smooth, 2))

    model = Net(body, second=nn.Conv2d(4, 2, 1)).eval()
    quantized = bw.prepare(model, image(), backend)
    x = image(4)
    bw.calibrate(quantized, [x])
    with torch.no_grad():
        expected, got = model(x), quantized(x)
    assert float((expected - got).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())


def test_a_residual_block_with_in_place_relu():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            identity = x
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += identity
            return self.relu(out)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), Block()).eval()
    quantized = prepared(model, image(2), image(5))
    assert not any(m.inplace for m in quantized.modules() if isinstance(m, nn.ReLU))
    assert all(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))


# ---------------------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("leaf", "call"),
    [
        (lambda: nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x)[0]),
        (lambda: nn.GRU(8, 8, num_layers=2, batch_first=True), lambda m, x: m(x)[1].transpose(0, 1)),
        (lambda: nn.Bilinear(8, 8, 8), lambda m, x: m(x, x)),
    ],
    ids=["LSTM", "GRU", "Bilinear"],
)
def test_what_torch_computes_in_one_go_stays_float_and_is_listed(leaf, call):
    class Wrap(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.leaf, self.last = nn.Linear(6, 8), leaf(), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(call(self.leaf, self.first(x)))

    model = Wrap()
    quantized = prepared(model, torch.randn(2, 5, 6), torch.randn(3, 5, 6))
    entries = {e.name: e for e in bw.ledger_of(quantized).entries}
    assert entries["leaf"].verdict is Verdict.FLOAT
    assert entries["leaf"].reason == "unknown operator"
    assert entries["leaf"].operator == type(model.leaf).__name__
    assert entries["first"].verdict is entries["last"].verdict is Verdict.INTEGER
    assert type(quantized.leaf) is type(model.leaf)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = torch.randn(2, 5, 6)
    quantized = bw.prepare(model, x)
    assert torch.allclose(quantized(x), model(x), atol=1e-6)
    verdicts = {e.name: e.verdict for e in bw.ledger_of(quantized).entries}
    assert verdicts["1.layers.0.linear1"] is verdicts["1.layers.1.linear2"] is Verdict.INTEGER


def test_a_subclass_of_a_layer_is_entered():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Standardized(4, 4, 3, padding=1))
    quantized = prepared(model, image(2), image(3))
    operators = [e.operator for e in bw.ledger_of(quantized).entries if e.verdict is Verdict.INTEGER]
    assert operators == ["conv2d", "conv2d"]


def test_weight_norm_by_hook_and_by_parametrization():
    old = torch.nn.utils.weight_norm(nn.Linear(6, 4))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(6, 6), old, new)
    quantized = prepared(model, torch.randn(2, 6), torch.randn(3, 6))
    x = torch.randn(8, 6)
    bw.calibrate(quantized, [x])
    assert torch.allclose(quantized(x), model(x), atol=0.05)


# --------------------------------------------------------------------------------------------------- islands


class Moody(nn.Module):
    """Decides by its data."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.single = nn.Conv2d(width, width, 1)

    def forward(self, x):
        if x.mean() > 100:
            return x
        return self.single(self.inner(x))


def test_data_dependent_control_flow_is_an_island():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Moody(), nn.Conv2d(4, 2, 1)).eval()
    x = image()
    quantized = bw.prepare(model, x)
    ledger = bw.ledger_of(quantized)
    assert list(ledger.islands) == ["1"]
    assert ledger.islands["1"].startswith("Untraceable: if asks for the data of a tensor")
    for batch in (x, image(5)):
        assert torch.equal(quantized(batch), model(batch))
        assert torch.equal(quantized(batch + 1000), model(batch + 1000))
    assert isinstance(quantized.get_submodule("1"), Moody)
    assert isinstance(quantized.get_submodule("1.inner"), CapturedModel)
    assert isinstance(quantized.get_submodule("1.inner.0"), QuantConv2d)
    assert isinstance(quantized.get_submodule("1.single"), QuantConv2d)
    verdicts = {e.name: e.verdict for e in ledger.entries}
    assert verdicts["0"] is verdicts["2"] is verdicts["1.inner.0"] is verdicts["1.single"] is Verdict.INTEGER
    assert "fold_batchnorm: folded 1 into 0" in ledger.notes
    quantized.load_state_dict(model.state_dict())
    bw.calibrate(quantized, [x, image()])
    reference, got = model(x), quantized(x)
    assert float((reference - got).detach().pow(2).mean()) < 0.01 * float(reference.detach().pow(2).mean())


class Counting(nn.Module):
    """A root that cannot be traced, with methods of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        self.unused = nn.Linear(4, 4)

    def forward(self, x, which="a"):
        for layer in self.layers:
            x = layer(x)
        if float(x.detach().sum()) < -1e9:
            raise RuntimeError("never")
        return self.heads[which](x)

    def generate(self, x):
        return [self(x), self(x * 2)]


def test_a_root_that_is_an_island_keeps_its_class_and_methods():
    model = Counting().eval()
    x = torch.randn(2, 4)
    quantized = bw.prepare(model, x)
    assert type(quantized) is Counting
    assert quantized is not model
    assert "" in bw.ledger_of(quantized).islands
    assert all(torch.equal(a, b) for a, b in zip(quantized.generate(x), model.generate(x), strict=True))
    assert torch.equal(quantized(x, which="b"), model(x, which="b"))
    assert isinstance(quantized.layers[0], CapturedModel)
    assert isinstance(quantized.get_submodule("layers.1.0"), QuantLinear)
    assert isinstance(quantized.heads["a"], QuantLinear)
    assert isinstance(quantized.layers, nn.ModuleList)
    entries = {e.name: e.verdict for e in bw.ledger_of(quantized).entries}
    assert entries["layers.0.0"] is entries["heads.a"] is Verdict.INTEGER


def test_an_island_inside_an_island():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)
            self.moody = Moody()
            self.blocks = nn.ModuleList([Moody(), nn.Sequential(nn.Conv2d(4, 4, 1), Moody())])

        def forward(self, x):
            x = self.first(x)
            if bool((x > 1e9).any()):
                return x
            x = self.moody(x)
            for block in self.blocks:
                x = block(x)
            return x

    model = Outer().eval()
    quantized = bw.prepare(model, image())
    assert set(bw.ledger_of(quantized).islands) == {"", "moody", "blocks.0", "blocks.1.1"}
    x = image(3)
    assert torch.equal(quantized(x), model(x))
    swapped = [n for n, m in quantized.named_modules() if isinstance(m, QuantConv2d)]
    assert len(swapped) == 8
    assert len(swapped) == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    quantized.load_state_dict(model.state_dict())
    bw.calibrate(quantized, [image()])
    assert all(q.calibrated for q in quantizers(quantized).values())


@pytest.mark.parametrize(
    "body",
    [
        lambda self, x: self.conv(x) * x.sum().item(),
        lambda self, x: self.conv(x) + torch.tensor(x.mean().tolist()),
        lambda self, x: self.conv(x) + float(x.max()),
        lambda self, x: self.conv(x) + torch.from_numpy(x.detach().numpy()).mean(),
        lambda self, x: self.conv(x) if 3.0 not in x else x,
        lambda self, x: self.conv(x) + {2: 1.0, 3: 2.0}[int(x.argmax()) % 1 + 2],
    ],
    ids=["item", "tolist", "float", "numpy", "in", "int"],
)
def test_asking_for_data_makes_an_island(body):
    model = Net(body).eval()
    quantized = bw.prepare(model, image())
    assert list(bw.ledger_of(quantized).islands) == [""]
    assert type(quantized) is Net
    assert isinstance(quantized.conv, QuantConv2d)
    x = image(3)
    assert torch.equal(quantized(x), model(x))


def test_a_call_that_is_not_reached_stays_as_it_is():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(x) if float(x.sum()) > 0 else self.b(x)

    model = Branch().eval()
    quantized = bw.prepare(model, torch.ones(2, 4))
    islands = bw.ledger_of(quantized).islands
    assert islands["b"] == "not called by itself on the example inputs"
    assert isinstance(quantized.b[0], QuantLinear)
    assert torch.equal(quantized(-torch.ones(2, 4)), model(-torch.ones(2, 4)))


def test_an_island_may_do_more_than_call_its_parts():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

        def forward(self, x):
            if float(x.sum()) > 1e9:
                return x
            return self.part(x) * len(self.part)

    model, x = Curious().eval(), torch.randn(2, 3)
    quantized = bw.prepare(model, x)
    assert bw.ledger_of(quantized).islands == {"": "TypeError: object of type 'Sequential' has no len()"}
    assert torch.equal(quantized(x), model(x))
    assert isinstance(quantized.part[0], QuantLinear)


# ------------------------------------------------------------------------------------------- the user's class


class Talkative(nn.Module):
    kind = "talkative"

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.width, self.config = 3, {"layers": 1}

    def forward(self, x):
        return self.fc(x)

    def twice(self, x):
        return self(self(x))

    @property
    def size(self):
        return self.fc.weight.numel()


def test_methods_and_attributes_of_the_class_still_answer():
    model, x = Talkative().eval(), torch.randn(2, 3)
    quantized = prepared(model, x)
    assert (quantized.width, quantized.config, quantized.kind, quantized.size) == (3, {"layers": 1}, "talkative", 9)
    assert torch.equal(quantized.twice(x), model.twice(x))
    bw.calibrate(quantized, [x, model(x).detach()])
    assert torch.equal(quantized.twice(x), quantized(quantized(x)))
    assert copy.deepcopy(quantized).config == {"layers": 1}
    with pytest.raises(AttributeError, match="object has no attribute 'thrice'"):
        _ = quantized.thrice


def test_hooks_of_the_model_itself():
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    x = torch.randn(4, 3)
    quantized = prepared(model, torch.randn(2, 3), x)
    assert torch.equal(copy.deepcopy(quantized)(x), model(x))


def test_a_model_is_prepared_once():
    quantized = bw.prepare(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(ConfigError, match="this model is prepared already; prepare the float model it was made from"):
        bw.prepare(quantized, torch.randn(1, 3))


# --------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_a_module():
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not function"):
        bw.prepare(lambda x: x, torch.ones(1))
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not str"):
        bw.prepare("resnet18", torch.ones(1))
    with pytest.raises(ConfigError, match=r"the model must be a torch.nn.Module, not type"):
        bw.prepare(nn.ReLU, torch.ones(1))


def test_example_inputs_the_model_refuses():
    model = Net(lambda self, x: self.conv(x))
    with pytest.raises(ConfigError, match=r"Net does not take the example inputs \(float32\[2, 5\]\): RuntimeError"):
        bw.prepare(model, torch.randn(2, 5))
    with pytest.raises(ConfigError, match=r"Sequential does not take .* \(x=float32\[1\], n=3\): TypeError"):
        bw.prepare(nn.Sequential(nn.ReLU()), {"x": torch.ones(1), "n": 3})


def test_a_model_that_is_never_the_same_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.calls = []

        def forward(self, x):
            self.calls.append(1)
            return self.fc(x) + len(self.calls)

    with pytest.raises(CaptureError, match="the captured Fickle does not compute what the original does") as caught:
        bw.prepare(Fickle(), torch.ones(1, 2))
    assert isinstance(caught.value, BitwrightError)


# --------------------------------------------------------------------------------------------- nothing is left


def test_the_original_is_left_untouched():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)).train()
    model[0].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    x = image()
    given = x.clone()
    quantized = bw.prepare(model, x)
    assert same(dict(model.state_dict()), dict(before))
    assert all(m.training for m in model.modules())
    assert not any(m.training for m in quantized.modules())
    assert type(model[0]) is nn.Conv2d
    assert model[2].inplace
    assert len(model[0]._forward_hooks) == len(quantized.get_submodule("0")._forward_hooks) == 1
    assert not any(len(m._forward_pre_hooks) for m in [*model.modules(), *quantized.modules()])
    assert torch.equal(x, given)
    with torch.no_grad():
        quantized.get_submodule("0").weight.zero_()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not quantized.state_dict().keys() - before.keys() - {k for k in quantized.state_dict() if "quantizer" in k}


def test_torch_is_restored_even_after_an_error():
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__
    makers = {name: getattr(torch, name) for name in ("zeros", "arange", "tensor", "ones", "full")}

    def body(self, x):
        if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor:
            raise KeyboardInterrupt
        return self.conv(x)

    with pytest.raises(KeyboardInterrupt):
        bw.prepare(Net(body), image())
    bw.prepare(Net(lambda self, x: self.conv(x) * x.sum().item()), image())
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is getattribute
    assert all(getattr(torch, name) is maker for name, maker in makers.items())


def test_random_numbers():
    def body(self, x):
        return self.conv(x) + torch.rand(x.shape[0], 4, 1, 1) + torch.randn_like(x)[:, :1] + torch.randn(1)

    model = Net(body).eval()
    x = image(3)
    before = torch.get_rng_state()
    quantized = bw.prepare(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(quantized(x), expected)


def test_what_forward_stores_on_the_model_is_not_a_proxy():
    def body(self, x):
        self.last = self.conv(x)
        self.cache = {"x": x}
        self.count = self.count + 1
        return self.last * 2

    model = Net(body, count=torch.zeros(())).eval()
    quantized = prepared(model, image())
    assert float(quantized.count) == 0
    copy.deepcopy(quantized)
    assert not hasattr(model.conv, "last")


def test_plain_tensors_and_constants_are_part_of_the_model():
    class Anchored(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.offset = torch.tensor([1.0, 2.0, 3.0])
            self.register_buffer("hidden", torch.ones(3), persistent=False)

        def forward(self, x):
            return self.fc(x) * self.offset + torch.tensor([0.5, 0.25, 0.0]) + self.hidden

    model = nn.Sequential(Anchored(), Anchored())
    quantized = prepared(model, torch.randn(2, 3))
    assert set(model.state_dict()) == {k for k in quantized.state_dict() if "quantizer" not in k}
    quantized.load_state_dict(model.state_dict())
    alone = prepared(Anchored(), torch.randn(2, 3))
    assert {k for k in alone.state_dict() if "quantizer" not in k} == {"fc.weight", "fc.bias"}
    twin = copy.deepcopy(alone)
    x = torch.randn(4, 3)
    assert torch.equal(twin(x), alone(x))
    assert set(twin.state_dict()) == set(alone.state_dict())
    assert capture(model, torch.randn(2, 3)).islands == {}


# ------------------------------------------------------------------------------------------------ copies, state


class Headed(nn.Module):
    """A folded BatchNorm, an unused head, and an island."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.island = Moody()
        self.fc = nn.Linear(4, 2)
        self.unused = nn.Linear(7, 7)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.fc(self.island(self.stem(x)).mean((2, 3)) - self.mean)


def random_norms(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_copy_computes_the_same_and_is_independent(calibrated):
    model = random_norms(Headed()).eval()
    quantized = bw.prepare(model, image())
    if calibrated:
        bw.calibrate(quantized, [image()])
    twin = copy.deepcopy(quantized)
    x = image(3)
    assert torch.equal(twin(x), quantized(x))
    assert list(twin.state_dict()) == list(quantized.state_dict())
    conv = twin.get_submodule("stem.0")
    assert conv.folded_norm is twin.get_submodule("stem.1")
    assert conv.folded_norm is not quantized.get_submodule("stem.1")
    assert torch.equal(twin.unused.weight, model.unused.weight)
    shared = {id(p) for p in quantized.parameters()} & {id(p) for p in twin.parameters()}
    assert not shared
    with torch.no_grad():
        twin.get_submodule("stem.0").weight.zero_()
    assert not torch.equal(twin(x), quantized(x))
    again = copy.deepcopy(twin)
    bw.calibrate(again, [image()])
    assert bw.ledger_of(again).entries == bw.ledger_of(quantized).entries


def test_a_float_checkpoint_loads_strictly():
    source = random_norms(Headed()).eval()
    quantized = bw.prepare(Headed(), image())
    result = quantized.load_state_dict(source.state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x = image(3)
    assert torch.equal(quantized(x), source(x))


@pytest.mark.parametrize("target_calibrated", [False, True])
def test_a_prepared_checkpoint_loads_strictly(target_calibrated):
    source = bw.prepare(random_norms(Headed()).eval(), image())
    bw.calibrate(source, [image(8)])
    target = bw.prepare(Headed(), image())
    if target_calibrated:
        bw.calibrate(target, [image()])
    target.load_state_dict(source.state_dict(), strict=True)
    x = image(3)
    assert torch.equal(target(x), source(x))
    fresh = bw.prepare(Headed(), image())
    source.load_state_dict(fresh.state_dict(), strict=True)
    assert not any(q.calibrated for q in quantizers(source).values())
    assert torch.equal(source(x), fresh(x))


def test_the_first_deviating_node_is_named():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = []
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(x)

    model = nn.Sequential(nn.Linear(2, 2), Drifting(), nn.ReLU())

    def drift(module, args, output):
        module.calls.append(1)
        return output + len(module.calls)

    model[1].register_forward_hook(drift)
    with pytest.raises(CaptureError, match=r"the captured Sequential does not compute .* node that deviates is"):
        bw.prepare(model, torch.ones(1, 2))
