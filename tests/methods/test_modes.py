"""Every method gives the same in compiled kernels, torch.compile, autocast and checkpoints, and on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitwright.methods import METHODS
from bitwright.numerics.fused import SMALL, Fused
from bitwright.spec import QuantSpec

METHOD_NAMES = [
    "FixedFakeQuantize",
    "LearnableFakeQuantize",
    "LSQPlusFakeQuantize",
    "PACTFakeQuantize",
    "DoReFaFakeQuantize",
    "DSQFakeQuantize",
    "TqtFakeQuantize",
    "NNIEFakeQuantize",
    "APoTFakeQuantize",
    "AdaRoundFakeQuantize",
    "QDropFakeQuantize",
    "StochasticFakeQuantize",
]
BY_CHANCE = ("QDropFakeQuantize", "StochasticFakeQuantize")


class Layer(nn.Module):
    """A linear layer whose weight goes through a method."""

    def __init__(self, name, shape=(8, 24), spec="int4 channel:0"):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape))
        parsed = QuantSpec.parse(spec)
        size = parsed.param_shape(shape)
        self.register_buffer("scale", (0.5 + torch.rand(size)) * 0.4)
        self.register_buffer("zero_point", torch.zeros(size, dtype=torch.int32))
        self.method = METHODS.get(name)(parsed)
        self.method.start(self.scale, self.zero_point)
        if name == "AdaRoundFakeQuantize":
            self.method.init(torch.randn(shape), self.scale, self.zero_point)

    def forward(self, x):
        return nn.functional.linear(x, self.method(self.weight, self.scale, self.zero_point))

    def quantized(self, seed=3):
        """The quantized weight, and the gradients of weight and of what is learned, by name."""
        self.zero_grad()
        torch.manual_seed(seed)
        y = self.method(self.weight, self.scale, self.zero_point)
        y.backward(torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
        return y.detach(), {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


@pytest.fixture
def compiled_kernels(monkeypatch):
    """The kernels that were compiled; none may fall back to eager."""
    used = []
    plain = Fused.__call__

    def recorded(self, x, *args):
        result = plain(self, x, *args)
        used.append(self)
        assert self.eager not in self._kernels.values(), f"{self.eager.__name__} could not be compiled"
        return result

    monkeypatch.setattr(Fused, "__call__", recorded)
    return used


def step_of(layer, x, run=None):
    """Output and gradients of one training step."""
    layer.zero_grad()
    torch.manual_seed(3)
    y = layer(x) if run is None else run(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_compiled_kernels_give_the_bits_of_eager_ones(name, monkeypatch, compiled_kernels):
    """Values and gradients of single values bit for bit; only sums over many values may differ in the last bits.

    NNIE's powers of two come from the libraries that eager and compiled code call: the last bit may differ.
    """
    layer = Layer(name, (4, SMALL // 4 + 5))
    monkeypatch.setenv("BITWRIGHT_COMPILE", "0")
    values, gradients = layer.quantized()
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    compiled_values, compiled_gradients = layer.quantized()
    assert any(kernel._kernels for kernel in compiled_kernels)
    most = 2**-23 if name == "NNIEFakeQuantize" else 0.0
    torch.testing.assert_close(values, compiled_values, rtol=most, atol=0.0)
    for part, gradient in gradients.items():
        if gradient.numel() == layer.weight.numel() and name != "DoReFaFakeQuantize":
            assert torch.equal(gradient, compiled_gradients[part]), part
        else:  # DoReFa's gradient of the largest value holds a sum
            torch.testing.assert_close(gradient, compiled_gradients[part], rtol=2e-7, atol=1e-6, msg=part)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_torch_compile_sees_through(name):
    torch.compiler.reset()  # it counts compilations of Layer.forward, and refuses the ninth
    layer, x = Layer(name), torch.randn(16, 24)
    expected = step_of(layer, x)
    got = step_of(layer, x, torch.compile(layer, backend="aot_eager", fullgraph=True))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["LearnableFakeQuantize", "DSQFakeQuantize"])
def test_torch_compile_with_inductor(name):
    layer, x = Layer(name), torch.randn(16, 24)
    expected = step_of(layer, x)
    got = step_of(layer, x, torch.compile(layer, fullgraph=True))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_checkpoints_give_the_same_step(name):
    layer, x = Layer(name), torch.randn(16, 24)
    expected = step_of(layer, x)
    got = step_of(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_autocast_quantizes_in_float32(name):
    layer, x = Layer(name), torch.randn(16, 24)
    expected = step_of(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(3)
        weight = layer.method(layer.weight, layer.scale, layer.zero_point)
        got = step_of(layer, x)
    torch.manual_seed(3)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, layer.method(layer.weight, layer.scale, layer.zero_point))
    assert got[0].dtype == torch.bfloat16
    for one, other in zip(expected, got, strict=True):
        assert float((one - other).norm()) <= 0.05 * float(one.norm()) + 1e-3


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_evaluation_without_gradients_has_the_values_of_training(name):
    layer = Layer(name)
    layer.eval()
    if name == "AdaRoundFakeQuantize":
        layer.method.harden()
    values, _ = layer.quantized()
    with torch.no_grad():
        plain = layer.method(layer.weight, layer.scale, layer.zero_point)
    assert torch.equal(values, plain)
    assert not plain.requires_grad
    if name in BY_CHANCE:
        assert torch.equal(layer.quantized(seed=4)[0], plain)  # chance is for training


TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import bitwright as bw
from bitwright.quantizer import TensorQuantizer

rank, world, store, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)


def quantizer(spec, data):
    made = TensorQuantizer(spec, method="lsq", method_options={"use_grad_scaling": False})
    made.observe()
    made(data)
    made.compute_qparams()
    made.quantize()
    return made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.weight = quantizer("int4 channel:0", self.layer.weight.detach())
        self.input = quantizer("uint4 symmetric", torch.rand(64, 6))

    def forward(self, x):
        return self.head(nn.functional.linear(self.input(x), self.weight(self.layer.weight), self.layer.bias).relu())


torch.manual_seed(0)
net, x, y = Net(), torch.rand(8, 6), torch.randn(8, 3)
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(net)
else:
    model = net
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
part = slice(rank * 8 // world, (rank + 1) * 8 // world)
for _ in range(5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[part]), y[part]).backward()
    optimizer.step()
found = {n: (p.detach().clone(), p.grad.clone()) for n, p in net.named_parameters()}
torch.save(found, target)
if world > 1:
    dist.destroy_process_group()
"""


def test_two_ranks_train_as_one(tmp_path):
    """LSQ under DistributedDataParallel: ranks agree, and take the steps of one process with the whole batch."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BITWRIGHT_COMPILE": "0"}
    jobs = []
    for rank, world, target in ((0, 2, "rank0"), (1, 2, "rank1"), (0, 1, "alone")):
        arguments = [str(script), str(rank), str(world), str(tmp_path / "store"), str(tmp_path / target)]
        jobs.append(subprocess.Popen([sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True))
    for job in jobs:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
    first, second, alone = (load(tmp_path / name) for name in ("rank0", "rank1", "alone"))
    assert any(name.endswith("method.scale") for name in alone)
    for name, (value, gradient) in alone.items():
        assert torch.equal(first[name][0], second[name][0]), name
        assert torch.equal(first[name][1], second[name][1]), name
        torch.testing.assert_close(first[name][0], value, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(first[name][1], gradient, rtol=1e-4, atol=1e-6, msg=name)


def load(path: Path):
    return torch.load(path, weights_only=True)
