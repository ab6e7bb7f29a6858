"""torch.compile and torch.export of prepared models: the same bits in evaluation, the same gradients in training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import CaptureError
from bitwright.quantizer import quantizers
from tests.graph.capture.capturing import DataDependent, Net, image

LEARNED = {"weight": {"method": "LearnableFakeQuantize"}, "activation": {"method": "LearnableFakeQuantize"}}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        y = (self.norm2(self.conv2(y)) + y).relu().mean((2, 3))
        return self.fc(y.view(x.shape[0], -1))


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.proj, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.out(F.gelu(x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks, self.head = nn.Sequential(Attention(), Attention()), nn.Linear(16, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


def linear_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), nn.ReLU(), nn.Linear(16, 4))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 16), layer, nn.Linear(16, 4))


NETS = [Residual, VisionTransformer, linear_net, encoder]


def prepared(build, mode="quantize", recipe=None):
    """A prepared net in evaluation, with its quantizers off, observing or quantizing."""
    torch.manual_seed(0)
    model, x = build().eval(), image()
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 2.0)
    quantized = bw.prepare(model, x, recipe=recipe)
    assert bw.ledger_of(quantized).islands == {}
    if mode == "quantize":
        bw.calibrate(quantized, [x])
    if mode == "observe":
        for quantizer in quantizers(quantized).values():
            quantizer.observe()
    return quantized


class Compiled:
    """A model compiled, where nothing else is said without breaks, by a backend that counts how often it is asked."""

    def __init__(self, model, backend="aot_eager", fullgraph=True):
        torch._dynamo.reset()
        self.graphs, self.backend = 0, torch._dynamo.lookup_backend(backend)
        self.call = torch.compile(model, backend=self.count, fullgraph=fullgraph)

    def count(self, graph, inputs):
        self.graphs += 1
        return self.backend(graph, inputs)


def equal_bits(compiled, model, *inputs):
    with torch.no_grad():
        return all(torch.equal(compiled(x), model(x)) for x in inputs)


@pytest.mark.parametrize("build", NETS)
@pytest.mark.parametrize("mode", ["off", "quantize"])
def test_evaluation_is_bit_equal(build, mode):
    model = prepared(build, mode)
    compiled = Compiled(model)
    assert equal_bits(compiled.call, model, image(2), image(2))
    assert compiled.graphs == 1
    assert equal_bits(compiled.call, model, image(5), image(7), image(3), image(6))
    assert compiled.graphs == 2  # one more, for all other batch sizes


def test_observers_see_what_they_see_in_eager():
    model = prepared(Residual, "observe")
    twin, compiled = copy.deepcopy(model), Compiled(model, fullgraph=False)
    batches = [image(2) for _ in range(12)]
    counts = []
    for x in batches:
        with torch.no_grad():
            assert torch.equal(compiled.call(x), twin(x))
        counts.append(compiled.graphs)
    assert len(set(counts[1:])) == 1
    for name, quantizer in quantizers(twin).items():
        assert quantizers(model)[name].observer.batches == quantizer.observer.batches == len(batches)
        for ours, expected in zip(quantizers(model)[name].observer.range(), quantizer.observer.range(), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("build", NETS)
def test_inductor_gives_equal_bits(build):
    model = prepared(build)
    assert equal_bits(Compiled(model, "inductor").call, model, image(2), image(2))


def gradients(model, call, x):
    model.zero_grad(set_to_none=True)
    call(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got, expected):
    """Equal up to rounding; the gradient of a bias before a normalization by the batch is nothing but rounding."""
    assert got.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=2e-3, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("build", [Residual, VisionTransformer])
@pytest.mark.parametrize("by_batch", [False, True], ids=["frozen", "by_batch"])
@pytest.mark.parametrize("recipe", [None, LEARNED], ids=["fixed", "learned"])
def test_training_has_the_same_gradients(build, recipe, by_batch):
    model = prepared(build, recipe=recipe).train()
    (bw.unfreeze_batchnorm if by_batch else bw.freeze_batchnorm)(model)
    with torch.no_grad():  # no weight at the end of its range, where a last bit decides whether it has a gradient
        for step in [p for name, p in model.named_parameters() if name.endswith("method.scale")]:
            step.mul_(1.03)
    twin, x = copy.deepcopy(model), image(8)
    compiled = Compiled(model)
    assert_close(gradients(model, compiled.call, x), gradients(twin, twin, x))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert compiled.graphs == 1


@pytest.mark.parametrize("recipe", [None, LEARNED], ids=["fixed", "learned"])
def test_training_steps_compile_once(recipe):
    model = prepared(Residual, recipe=recipe).train()
    compiled, optimizer = Compiled(model), torch.optim.SGD(model.parameters(), 0.05)
    x, target = image(8), torch.randn(8, 4)
    losses = []
    for _ in range(8):
        loss = F.mse_loss(compiled.call(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert compiled.graphs == 1
    model.eval()
    assert equal_bits(compiled.call, model, x)


@pytest.mark.slow
def test_inductor_trains():
    model = prepared(Residual, recipe=LEARNED).train()
    twin, x = copy.deepcopy(model), image(8)
    assert_close(gradients(model, Compiled(model, "inductor").call, x), gradients(twin, twin, x))


def test_a_change_of_mode_is_seen():
    model = prepared(linear_net, "off")
    compiled, x = Compiled(model).call, image()
    assert equal_bits(compiled, model, x)
    with torch.no_grad():
        floating = compiled(x)
    bw.calibrate(model, [x])
    assert equal_bits(compiled, model, x)
    with torch.no_grad():
        assert not torch.equal(compiled(x), floating)


def test_guards_hold():
    def body(self, x, flag=True):
        return self.conv(x) * 2 if x.shape[2] > 10 else self.conv(x)

    model = bw.prepare(Net(body).eval(), image(2, 8))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert equal_bits(compiled, model, *(image(2, size) for size in (8, 9, 10, 6)))
    with pytest.raises(CaptureError, match="take another path through the model"):
        compiled(image(2, 12))
    with pytest.raises(TypeError, match="unexpected keyword argument 'flog'"):
        compiled(image(), flog=False)


def test_an_island_breaks_the_graph_and_no_more():
    model = bw.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), DataDependent(), nn.Conv2d(4, 2, 1)).eval(), image())
    bw.calibrate(model, [image(8)])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert equal_bits(compiled, model, image(2), image(2) + 1000)


@pytest.mark.parametrize("build", NETS)
def test_torch_export_gives_equal_bits(build):
    model, x = prepared(build), image(5)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (image(3),), dynamic_shapes=({0: batch},))
    assert equal_bits(program.module(), model, x)
