"""Models that return objects, read a layer's weight elsewhere, or have very many channels."""

from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ExportError
from bitwright.exporting.deploy import deploy
from bitwright.graph.facts import facts


class Cache:
    """Keys and values of layers, as decoders return them."""

    def __init__(self) -> None:
        self.layers: list[Cache] = []
        self.length = 3


@dataclass
class Output:
    logits: Tensor
    cache: Cache
    hidden: tuple[Tensor, ...] | None = None


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Output:
        key, value = self.key(x), self.value(x)
        cache = Cache()
        for pair in ((key, value), (value.relu(), key.relu())):
            layer = Cache()
            layer.keys, layer.values = pair
            cache.layers.append(layer)
        return Output(self.head(key + value), cache, (key.tanh(), x))


class Growing(nn.Module):
    """A cache that starts empty, next to a constant that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.fc(x)
        keys = torch.cat([torch.tensor([], dtype=y.dtype, device=y.device), y.transpose(0, 1)], dim=-2)
        more = torch.cat([torch.tensor([[1.0] * 8], dtype=y.dtype, device=y.device), y])
        return keys, more, keys * 2


class Reads(nn.Module):
    """Reads the weights of its layers: for a device and a type, as values, and in an island."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(8, device=self.a.weight.device, dtype=self.b.weight.dtype)
        y = self.a(x) * ones + F.linear(x, self.a.weight.t()).relu()
        return self.b(y) * self.b.weight.abs().mean() + self.c.weight.shape[0] + y @ self.c.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(self.embed(x)).relu())


def prove(net: nn.Module, x: Tensor, path: Path) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    model = bw.calibrate(bw.prepare(net.eval(), x), [x])
    proof = bw.verify(model, bw.export(model, path), [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed
    return model, onnx.load(path)


def test_every_tensor_of_a_returned_object_is_an_output(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    model, file = prove(Decoder(), x, tmp_path / "m.onnx")
    names = [o.name for o in file.graph.output]
    pairs = [f"cache.layers.{i}.{part}" for i in (0, 1) for part in ("keys", "values")]
    assert names[:-1] == ["logits", *pairs, "hidden.0"]
    got = bw.run_file(tmp_path / "m.onnx")(x)
    with torch.no_grad():
        result = model(x)
    first, second = result.cache.layers
    expected = [result.logits, first.keys, first.values, second.keys, second.values, *result.hidden]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.05)


@pytest.mark.parametrize("net", [Reads, Tied])
def test_weights_that_are_read_elsewhere(net: type, tmp_path: Path) -> None:
    x = torch.randn(4, 8) if net is Reads else torch.randint(0, 20, (2, 5))
    model, _ = prove(net(), x, tmp_path / "m.onnx")
    with torch.no_grad():
        expected = model(x)
    gap = (bw.run_file(tmp_path / "m.onnx")(x) - expected).abs().max()
    assert float(gap) <= 0.02 * float(expected.abs().max())


def test_ten_thousand_classes(tmp_path: Path) -> None:
    _, file = prove(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 10_000)), torch.randn(4, 4), tmp_path / "m")
    assert "Cast" not in {n.op_type for n in file.graph.node}


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_caches_that_are_empty_at_first_are_proven(tmp_path, runtime):
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    model = bw.calibrate(bw.prepare(Growing(), x, backend=runtime), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x], runtimes=[runtime], latency=False)
    assert proof.ok, proof.missed
    assert sum(node.target is torch.cat for node in model.graph.nodes) == 1


def test_complex_tensors_have_no_guards() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex(self.fc(x).unflatten(-1, (4, 2))) * torch.polar(x[0, :4], x[1, :4])
            return self.head(torch.view_as_real(turned).flatten(-2))

    x = torch.randn(3, 8)
    twin = deploy(bw.calibrate(bw.prepare(Rotated(), x, backend="openvino"), [x])).model
    guards = [node.args[0] for node in twin.graph.nodes if "bitwright.guards" in str(node.target)]
    assert not any(facts(node).tensor.dtype.is_complex for node in guards)
    assert any(facts(node).tensor.dtype.is_complex for node in twin.graph.nodes if facts(node).tensor)


class Stateful(nn.Module):
    """Counts its calls, and may add the count to its result."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4), read
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) + self.calls if self.read else self.fc(x)


@pytest.mark.parametrize("read", [False, True])
def test_state_is_refused_where_results_depend_on_it(tmp_path: Path, read: bool) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    model = bw.prepare(Stateful(read).eval(), (x,), backend="onnxruntime")
    bw.calibrate(model, [x])
    file = tmp_path / "state.onnx"
    if read:
        with pytest.raises(ExportError, match=r"^the model changes its buffer 'calls' whenever it runs"):
            bw.export(model, file)
        assert not file.exists()
    else:
        bw.export(model, file)
        assert bw.verify(model, file, [x], latency=False).ok
