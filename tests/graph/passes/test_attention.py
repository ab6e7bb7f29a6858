"""Attention in parts: modules split into projections and products, and the fused function decomposed."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


class Attend(nn.Module):
    """One attention module between two layers, called in the way that ``kind`` says."""

    def __init__(self, kind="self", options=None, hidden=8, **settings):
        super().__init__()
        self.kind, self.options = kind, options or {}
        self.first = nn.Linear(8, 8)
        self.attn = nn.MultiheadAttention(8, 2, **settings)
        for parameter in self.attn.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x, y, z, mask=None, padding=None):
        x = self.first(x)
        tensors = {"self": (x, x, x), "cross": (x, y, y), "all": (x, y, z)}[self.kind]
        return self.attn(*tensors, attn_mask=mask, key_padding_mask=padding, **self.options)


def inputs(kind, first, width, mask, padding, batch=2, queries=5, keys=7):
    keys = queries if kind == "self" else keys

    def make(length, size):
        return torch.randn((batch, length, size) if first else (length, batch, size))

    x, y, z = make(queries, 8), make(keys, width), make(keys, width)
    shut = torch.zeros(batch, keys, dtype=torch.bool)
    shut[0, -1] = True
    masks = {
        None: None,
        "bool": torch.ones(queries, keys, dtype=torch.bool).triu(1),
        "float": torch.randn(queries, keys),
        "heads": torch.randn(batch * 2, queries, keys),
    }
    paddings = {None: None, "bool": shut, "float": torch.zeros(batch, keys).masked_fill(shut, -math.inf)}
    return x, y, z, masks[mask], paddings[padding]


def split(model):
    return [n for n in bw.ledger_of(model).notes if n.startswith("split_attention")]


SETTINGS = [
    {"batch_first": True},
    {"batch_first": False, "bias": False},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    {"batch_first": False, "kdim": 6, "vdim": 6, "add_zero_attn": True},
    {"batch_first": True, "dropout": 0.25},
]
MASKS = [(None, None), ("bool", "bool"), ("float", "float"), ("heads", "bool")]
CALLS = list(itertools.product(["self", "cross", "all"], range(len(SETTINGS)), [True, False]))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(("kind", "index", "weights"), CALLS)
def test_every_argument_is_honoured(kind, index, weights):
    settings = SETTINGS[index]
    width = settings.get("kdim", 8)
    if kind == "self" and width != 8:
        kind = "cross"
    torch.manual_seed(index)
    for number, (mask, padding) in enumerate(MASKS):
        options = {"need_weights": weights, "average_attn_weights": number % 2 == 0}
        net = Attend(kind, options, **settings).eval()
        made = [
            inputs(kind, settings["batch_first"], width, mask, padding, **sizes)
            for sizes in ({}, {"batch": 3, "queries": 4, "keys": 6})
        ]
        model = bw.prepare(net, made[0])
        assert split(model) == ["split_attention: split attn into projections and products"]
        for example in made:
            with torch.no_grad():
                expected, got = net(*example), model(*example)
            # Only torch's native kernel for masks, which it has for self-attention, adds in another order.
            exact = kind != "self" or "bool" not in (mask, padding)
            tolerance = 0 if exact else 2e-6
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_the_function_is_split_too(separate, weights):
    class Pool(nn.Module):
        """Attention of the mean over a feature map, with projections that are layers of their own."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            x = x.flatten(2).permute(2, 0, 1)
            x = torch.cat([x.mean(0, keepdim=True), x], 0)
            parts = (self.q, self.k, self.v)
            options = {f"{n}_proj_weight": p.weight for n, p in zip("qkv", parts, strict=True)} if separate else {}
            packed = None if separate else torch.cat([p.weight for p in parts])
            bias = torch.cat([p.bias for p in parts])
            return F.multi_head_attention_forward(
                *(x[:1], x, x, 8, 2, packed, bias, None, None, False, 0.1, self.out.weight, self.out.bias),
                training=self.training,
                need_weights=weights,
                use_separate_proj_weight=separate,
                **options,
            )[0]

    net, x = Pool().eval(), torch.randn(2, 8, 3, 3)
    model = bw.prepare(net, x, debug=True)
    assert split(model) == ["split_attention: split multi_head_attention_forward into projections and products"]
    for example in (x, torch.randn(3, 8, 2, 4)):
        assert torch.equal(model(example), net(example))
    operators = [e.operator for e in bw.ledger_of(model).entries if e.verdict.value == "integer"]
    assert operators.count("linear") == (4 if separate else 3)


def test_a_causal_hint():
    options = {"need_weights": False, "is_causal": True}
    net = Attend("self", options, batch_first=False).eval()
    x = torch.randn(5, 2, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    model = bw.prepare(net, (x, x, x, mask))
    assert torch.equal(model(x, x, x, mask)[0], net(x, x, x, mask)[0])
    assert [n for n in model.graph.nodes if n.kwargs.get("is_causal") is True]


@pytest.mark.parametrize("kind", ["self", "cross", "all"])
def test_without_a_batch(kind):
    net = Attend(kind, {"average_attn_weights": False}).eval()
    x, y = torch.randn(7, 8), torch.randn(7, 8)
    padding = torch.arange(7) > 4
    model = bw.prepare(net, (x, y, y, None, padding))
    torch.testing.assert_close(model(x, y, y, None, padding), net(x, y, y, None, padding), rtol=0, atol=0)


def test_parameters_keep_their_names_and_train():
    net = Attend("self", batch_first=True, dropout=0.5).eval()
    x = torch.randn(2, 5, 8)
    model = bw.prepare(net, (x, x, x))
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    other = {k: torch.randn_like(v) for k, v in net.state_dict().items()}
    net.load_state_dict(other)
    model.load_state_dict(other, strict=False)
    torch.testing.assert_close(model(x, x, x), net(x, x, x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(model)(x, x, x), net(x, x, x), rtol=0, atol=0)
    model.train(), net.train()
    torch.manual_seed(3)
    got = model(x, x, x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, net(x, x, x))  # the same weights are dropped
    assert not torch.equal(model(x, x, x)[0], got[0])
    bw.calibrate(model.eval(), [(x, x, x)])
    model(x, x, x)[0].pow(2).sum().backward()
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight"):
        assert float(model.get_parameter(f"attn.{name}").grad.abs().max()) > 0


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_fused_product_drops_weights_in_training(batch_first):
    net = Attend("cross", {"need_weights": False}, batch_first=batch_first, dropout=0.5).eval()
    x, y, *_ = inputs("cross", batch_first, 8, None, None)
    model = bw.prepare(net, (x, y, y))
    for mode in (True, False):
        model.train(mode), net.train(mode)
        torch.manual_seed(3)
        got = model(x, y, y)[0]
        torch.manual_seed(3)
        assert torch.equal(got, net(x, y, y)[0])


def test_the_parts_are_quantized_and_can_be_skipped():
    net = Attend("self", batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    model = bw.prepare(net, (x, x, x))
    verdicts = {e.name: e.verdict.value for e in bw.ledger_of(model).entries}
    assert verdicts["attn_in_proj"] == verdicts["attn_out_proj"] == verdicts["bmm"] == verdicts["bmm_1"] == "integer"
    bw.calibrate(model, [(x, x, x)])
    with torch.no_grad():
        expected, got = net(x, x, x)[0], model(x, x, x)[0]
    assert float((got - expected).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())
    model = bw.prepare(net, (x, x, x), skip=["attn"])
    verdicts = {e.name: e.verdict.value for e in bw.ledger_of(model).entries if e.operator in ("linear", "matmul")}
    assert verdicts == {"first": "integer", "attn_in_proj": "float", "bmm": "float", "bmm_1": "float"} | {
        "attn_out_proj": "float"
    }


def test_a_module_with_hooks_stays_whole():
    net = Attend("self", batch_first=True).eval()
    net.attn.register_forward_hook(lambda m, a, out: None)
    x = torch.randn(2, 5, 8)
    model = bw.prepare(net, (x, x, x))
    assert split(model) == ["split_attention: not split: attn, it has hooks"]
    assert type(model.attn) is nn.MultiheadAttention


def test_a_subclass_stays_whole():
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return out * 2, weights

    net = Attend("self", batch_first=True)
    net.attn = Own(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    model = bw.prepare(net.eval(), (x, x, x))
    with torch.no_grad():
        torch.testing.assert_close(model(x, x, x), net(x, x, x))


def test_one_module_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

        def forward(self, x):
            y = self.attn(x, x, x, need_weights=False)[0]
            return self.attn(y, x, x)

    net, x = Twice().eval(), torch.randn(2, 5, 8)
    model = bw.prepare(net, x)
    assert len(split(model)) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x), rtol=0, atol=0)
        torch.testing.assert_close(model(x[:1, :3]), net(x[:1, :3]), rtol=0, atol=0)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_with_masks(norm_first, tmp_path):
    torch.manual_seed(0)
    net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True, norm_first=norm_first).eval()
    source, goal = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    kwargs = {"src": source, "tgt": goal, "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4)}
    model = bw.prepare(net, kwargs, debug=True)
    assert len(split(model)) == 3
    with torch.no_grad():
        torch.testing.assert_close(model(**kwargs), net(**kwargs), rtol=0, atol=1e-5)
        bw.calibrate(model, [kwargs])
        expected, got = net(**kwargs), model(**kwargs)
    assert torch.isfinite(got).all()
    assert float((got - expected).pow(2).mean()) < 0.05 * float(expected.pow(2).mean())


@pytest.mark.parametrize(("backend", "kind"), [("onnxruntime", "self"), ("openvino", "cross")])
def test_the_file_computes_what_the_simulation_does(backend, kind, tmp_path):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attn = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.embed(x)
            other = x if kind == "self" else x.flip(1)
            return self.head(self.norm(x + self.attn(x, other, other, need_weights=False)[0]).mean(1))

    torch.manual_seed(0)
    net, x = Classifier().eval(), torch.randn(4, 5, 6)
    model = bw.prepare(net, x, backend)
    bw.calibrate(model, [x, torch.randn(4, 5, 6)])
    bw.export(model, tmp_path / "net.onnx")
    proof = bw.verify(model, tmp_path / "net.onnx", [torch.randn(3, 5, 6)], latency=False)
    assert proof.ok, str(proof)


# ----------------------------------------------------------------------------------------------------- decomposition


def qkv(*lead, queries=5, keys=6, size=4):
    return tuple(torch.randn(*lead, n, size) for n in (queries, keys, keys))


@pytest.mark.parametrize("lead", [(2, 3), (2,), (1, 2, 2)])
@pytest.mark.parametrize("mask", [None, "bool", "float", "causal", "row"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_fused_function_is_decomposed(lead, mask, scale):
    class Net(nn.Module):
        def forward(self, q, k, v, m=None):
            return F.scaled_dot_product_attention(q, k, v, m, is_causal=mask == "causal", scale=scale)

    seen = torch.rand(5, 6) > 0.4
    seen[:, 0] = True
    if mask == "row":
        seen[2] = False  # a query that may look at nothing gives zeros
    masks = {"bool": (seen,), "row": (seen,), "float": (torch.randn(5, 6),)}.get(mask, ())
    example = (*qkv(*lead), *masks)
    net = Net()
    model = bw.prepare(net, example, recipe={"schedules": {"decompose_attention": True}}, debug=True)
    assert F.scaled_dot_product_attention not in {n.target for n in model.graph.nodes}
    for given in (example, (*qkv(*lead), *masks)):
        torch.testing.assert_close(model(*given), net(*given), rtol=1e-5, atol=1e-6)


def test_grouped_queries_and_dropout():
    class Net(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, enable_gqa=True)

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 4)
    model = bw.prepare(Net(), (q, k, v), recipe={"schedules": {"decompose_attention": True}})
    torch.testing.assert_close(model(q, k, v), Net()(q, k, v), rtol=1e-5, atol=1e-6)


def test_off_by_default_and_for_split_modules_too():
    net = Attend("cross", {"need_weights": False}, batch_first=True, dropout=0.3).eval()
    x, y, *_ = inputs("cross", True, 8, None, None)
    whole = bw.prepare(net, (x, y, y))
    parts = bw.prepare(net, (x, y, y), recipe={"schedules": {"decompose_attention": True}})
    operators = [{e.operator for e in bw.ledger_of(m).entries} for m in (whole, parts)]
    assert "scaled_dot_product_attention" in operators[0] - operators[1]
    assert {"matmul", "softmax"} <= operators[1] - operators[0]
    torch.testing.assert_close(parts(x, y, y), net(x, y, y), rtol=1e-5, atol=1e-6)
    assert not torch.equal(parts.train()(x, y, y)[0], parts(x, y, y)[0])
    bw.calibrate(parts.eval(), [(x, y, y)])
    with torch.no_grad():
        expected, got = net(x, y, y)[0], parts(x, y, y)[0]
    assert float((got - expected).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())
