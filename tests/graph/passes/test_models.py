"""All schedules together, in debug mode, on models in well-known styles: values stay, and little is float."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.graph import SCHEDULES
from tests.graph.passes.nets import FrozenNorm


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps),
            inplace=True,
        )


class Shuffle(nn.Module):
    """A ShuffleNet unit: split, two branches, concatenation, shuffle."""

    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)),
            *(nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half)),
            *(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)),
        )

    def forward(self, x):
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, self.branch(changed)), dim=1)
        n, c, h, w = x.size()
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


class Scaled(nn.Module):
    """A ConvNeXt block: depthwise, channels last, layer scale, residual."""

    def __init__(self, channels):
        super().__init__()
        self.depth, self.norm = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))
        self.drop = nn.Identity()

    def forward(self, x):
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + self.drop(y.permute(0, 3, 1, 2))


class Window(nn.Module):
    """Shifted window attention as Swin has it, with a table of positions and a mask."""

    def __init__(self, size=4, dim=8, heads=2):
        super().__init__()
        self.size, self.heads = size, heads
        self.qkv, self.proj, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(0.0)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None]).permute(1, 2, 0) + size - 1
        self.register_buffer("index", apart[..., 0] * (2 * size - 1) + apart[..., 1], persistent=False)

    def forward(self, x):
        b, h, w, c = x.shape
        s = self.size
        x = torch.roll(x, (-1, -1), (1, 2))
        x = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(x).reshape(-1, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1)
        scores = scores + bias.unsqueeze(0)
        mask = torch.zeros(s * s, s * s, device=x.device)
        mask[0, -1] = -100.0
        x = (F.softmax(scores + mask, dim=-1) @ v).transpose(1, 2).reshape(-1, s * s, c)
        x = self.drop(self.proj(x))
        x = x.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, (1, 1), (1, 2))


class Vision(nn.Module):
    """A ViT of torch's own attention, with a class token and positions."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Detector(nn.Module):
    """A frozen backbone, a transformer with queries, and shared heads, as DETR has them."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4, bias=False), FrozenNorm(8)
        self.input = nn.Conv2d(8, 8, 1)
        self.queries = nn.Embedding(3, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16)
        self.box = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        x = self.input(F.relu(self.norm(self.stem(x))))
        x = x.flatten(2).permute(2, 0, 1)
        queries = self.queries.weight.unsqueeze(1).repeat(1, x.shape[1], 1)
        out = self.transformer(x, queries).transpose(0, 1)
        return {"boxes": self.box(out).sigmoid(), "first": self.box(out[:, :1])}


class Language(nn.Module):
    """A causal decoder with a mask of -inf and a tied head."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.qkv, self.proj, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        b, t = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(t, device=tokens.device))
        q, k, v = self.qkv(self.norm(x)).split(8, dim=2)
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / 2.0 + self.mask[:t, :t]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj((torch.softmax(scores, -1) @ v + y).transpose(1, 2).reshape(b, t, 8))
        return self.head(x)


def image(batch, size=8):
    return torch.randn(batch, 3, size, size)


def tokens(batch, length):
    return torch.randint(0, 11, (batch, length))


MODELS = {
    "shufflenet": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), Shuffle(8), Shuffle(8)),
        lambda: (image(2), image(3), image(1, 12)),
    ),
    "convnext": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 2, 2), Scaled(8), Scaled(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)),
        lambda: (image(2), image(3), image(1, 12)),
    ),
    "efficientnet": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), NormAct(8), nn.Conv2d(8, 4, 1), NormAct(4)),
        lambda: (image(2), image(3), image(1, 12)),
    ),
    "swin": (lambda: Window(), lambda: (torch.randn(2, 8, 8, 8), torch.randn(3, 8, 8, 8), torch.randn(1, 12, 4, 8))),
    "vit": (lambda: Vision(), lambda: (image(2), image(3), image(1))),
    "detr": (lambda: Detector(), lambda: (image(2), image(3), image(1, 12))),
    "gpt": (lambda: Language(), lambda: (tokens(2, 6), tokens(3, 9), tokens(1, 1))),
}


def prepared(name, **schedules):
    torch.manual_seed(0)
    make, examples = MODELS[name]
    net = make()
    for norm in net.modules():
        if isinstance(getattr(norm, "running_var", None), torch.Tensor):
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.5, 1.5)
    net.eval()
    given = examples()
    return net, bw.prepare(net, given[0], recipe={"schedules": schedules}, debug=True), given


def flat(out):
    return torch.cat([v.flatten() for v in out.values()]) if isinstance(out, dict) else out.flatten()


@pytest.mark.parametrize("name", MODELS)
def test_values_stay_and_quantization_is_close(name):
    net, model, examples = prepared(name)
    with torch.no_grad():
        for x in examples:
            # Torch's native attention, which it takes in evaluation, has no other way of rounding here.
            torch.testing.assert_close(flat(model(x)), flat(net(x)), rtol=0, atol=0 if name != "vit" else 1e-6)
    assert {k for k in model.state_dict() if "quantizer" not in k} == set(net.state_dict())
    bw.calibrate(model, [examples[0], examples[1]])
    with torch.no_grad():
        expected, got = flat(net(examples[0])), flat(model(examples[0]))
        assert torch.equal(flat(copy.deepcopy(model)(examples[0])), got)
    assert float((got - expected).pow(2).mean()) < 0.03 * float(expected.pow(2).mean())
    out = flat(model.train()(examples[0]))
    out.pow(2).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["swin", "vit", "detr", "gpt"])
def test_with_everything_switched_on(name):
    more = {"decompose_attention": True, "cross_layer_equalization": True, "fold_constants": {"persistent": True}}
    net, model, examples = prepared(name, remove_dropout={"trained": True}, **more)
    with torch.no_grad():
        for x in examples:
            expected = flat(net(x))
            torch.testing.assert_close(flat(model(x)), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["shufflenet", "vit", "gpt"])
def test_with_everything_switched_off(name):
    net, model, examples = prepared(
        name, **dict.fromkeys([n for n in SCHEDULES.names() if n != "functionalize"], False)
    )
    with torch.no_grad():
        torch.testing.assert_close(flat(model(examples[1])), flat(net(examples[1])), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "floats"),
    [
        ("shufflenet", set()),
        ("efficientnet", set()),
        ("convnext", {"layer_norm", "gelu"}),
        ("vit", {"layer_norm", "gelu", "softmax", "mul"}),
    ],
)
def test_what_is_left_in_float(name, floats):
    _, model, _ = prepared(name)
    assert {e.operator for e in bw.ledger_of(model).entries if e.verdict.value == "float"} == floats
