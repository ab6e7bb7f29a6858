"""Capture: what cannot be traced runs as written, and its submodules are captured separately."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.graph import CapturedModel
from bitwright.nn import QuantConv2d, QuantLinear
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.graph.capture.capturing import DataDependent, Net, image


def test_data_dependent_control_flow_is_an_island():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), DataDependent(), nn.Conv2d(4, 2, 1)).eval()
    x = image()
    quantized = bw.prepare(model, x)
    ledger = bw.ledger_of(quantized)
    assert list(ledger.islands) == ["1"]
    assert ledger.islands["1"].startswith("Untraceable: if needs the data of a tensor")
    for batch in (x, image(5)):
        assert torch.equal(quantized(batch), model(batch))
        assert torch.equal(quantized(batch + 1000), model(batch + 1000))
    assert isinstance(quantized.get_submodule("1"), DataDependent)
    assert isinstance(quantized.get_submodule("1.inner"), CapturedModel)
    assert isinstance(quantized.get_submodule("1.inner.0"), QuantConv2d)
    assert isinstance(quantized.get_submodule("1.single"), QuantConv2d)
    verdicts = {e.name: e.verdict for e in ledger.entries}
    assert verdicts["0"] is verdicts["2"] is verdicts["1.inner.0"] is verdicts["1.single"] is Verdict.INTEGER
    (entry,) = (e for e in ledger.entries if e.name == "1")
    assert entry.reason == "an island: it runs as written, and its layers are listed separately"
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
            self.by_data = DataDependent()
            self.blocks = nn.ModuleList([DataDependent(), nn.Sequential(nn.Conv2d(4, 4, 1), DataDependent())])

        def forward(self, x):
            x = self.first(x)
            if bool((x > 1e9).any()):
                return x
            x = self.by_data(x)
            for block in self.blocks:
                x = block(x)
            return x

    model = Outer().eval()
    quantized = bw.prepare(model, image())
    assert set(bw.ledger_of(quantized).islands) == {"", "by_data", "blocks.0", "blocks.1.1"}
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
    assert islands["b"] == "not called on the example inputs"
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
    (reason,) = bw.ledger_of(quantized).islands.values()
    line = Curious.forward.__code__.co_firstlineno + 1
    assert reason == f"Untraceable: float() needs the data of a tensor (sum_1) at {__file__}:{line}"
    assert isinstance(quantized.part, CapturedModel)
    assert isinstance(quantized.part, nn.Sequential)
    assert torch.equal(quantized(x), model(x))
    assert isinstance(quantized.part[0], QuantLinear)


class Named(nn.Module):
    """Calls its parts by names that torch.fx.GraphModule has."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


@pytest.mark.parametrize("name", ["graph", "code", "meta", "recompile", "_graph", "add_submodule"])
def test_parts_with_the_names_of_a_graph_module(name: str):
    x = image()
    for prefix, model in (("", Named("first", name)), ("0.", nn.Sequential(Named(name), nn.Conv2d(3, 2, 1)))):
        model.eval()
        quantized = bw.prepare(model, x)
        assert torch.equal(quantized(x), model(x))
        assert isinstance(quantized.get_submodule(f"{prefix}{name}.0"), QuantConv2d)
        islands = {} if prefix else {"": f"its attribute '{name}' has a name that torch.fx needs"}
        assert bw.ledger_of(quantized).islands == islands
        quantized.load_state_dict(model.state_dict())
        bw.calibrate(quantized, [x])
        assert not torch.equal(quantized(x), model(x))
