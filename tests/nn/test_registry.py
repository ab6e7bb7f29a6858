"""A user's QModule, written here and not in the package: picked up, calibrated, trained, exported, reported."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.nn import (
    PlacedQuantizer,
    QuantInputMixin,
    QuantMixin,
    QuantOpr,
    list_qmodules,
    register_qmodule,
    unregister_qmodule,
)
from bitwright.nn.registry import QMODULES
from bitwright.preparation import Verdict


class Gate(nn.Module):
    """The user's own operator, with data-dependent Python that no tracer follows."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x, gate, power=1.0):
        if float(gate.abs().max()) == 0:
            return x
        return x * torch.sigmoid(gate) * self.weight * power


class QGate(QuantOpr):
    def __init__(self, org_module, config=None):
        super().__init__()
        self.weight = org_module.weight
        self.config = config

    def forward(self, x, gate, power=1.0):
        x, gate = self.input_quantizer(x), self.input_quantizer(gate)
        return x * torch.sigmoid(gate) * self.weight_quantizer(self.weight) * power


@pytest.fixture
def registered():
    before = dict(QMODULES)
    added = []

    def register(cls, *sources, **options):
        added.append(register_qmodule(sources=sources, **options)(cls))
        return cls

    yield register
    for cls in reversed(added):
        unregister_qmodule(cls)
    assert before == QMODULES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.side = nn.Conv2d(3, 4, 3)
        self.gate = Gate(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.gate(F.relu(self.conv(x)), self.side(x), 0.5))


def test_a_users_module_end_to_end(registered, tmp_path):
    registered(QGate, Gate)
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert isinstance(prepared.gate, QGate)
    assert isinstance(prepared.gate.input_quantizer, PlacedQuantizer)
    assert set(model.state_dict()) <= set(prepared.state_dict())
    entry = next(e for e in bw.ledger_of(prepared).entries if e.name == "gate")
    assert (entry.verdict, entry.operator) == (Verdict.INTEGER, "Gate")
    assert entry.weight.startswith("int7")
    assert entry.input == "uint8 affine tensor"

    bw.calibrate(prepared, [x])
    with torch.no_grad():
        want, before = model(x), prepared(x)
    assert 0 < float((before - want).abs().max()) < 0.1

    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    losses = []
    for _ in range(15):
        loss = (prepared(x) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(prepared.gate.weight, model.gate.weight)

    path = bw.export(prepared, tmp_path / "gate.onnx")
    with torch.no_grad():
        assert torch.allclose(bw.run_file(path)(x), prepared(x), atol=0.02)
    proof = bw.verify(prepared, path, [x], runtimes=["onnxruntime"], latency=False)
    assert proof.runtimes["onnxruntime"].largest <= 1
    stats = {s.name: s for s in bw.analyze(prepared, [x])}
    assert stats["gate"].verdict is Verdict.INTEGER
    page = bw.report(prepared, proof, tmp_path / "report.html", batches=[x])
    assert "gate" in page.read_text()


def test_multi_input_functions_and_methods(registered):
    class QAdd(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self.node = org_module.name

        def forward(self, a, b, *args, **kwargs):
            return self.input_quantizer(a) + self.input_quantizer(b)

    class QPower(QuantOpr):
        integer = True

        def __init__(self, org_module):
            super().__init__()
            self.exponent = org_module.args[1]

        def forward(self, x, *args):
            return self.input_quantizer(x).pow(self.exponent)

    registered(QAdd, operator.add, torch.add, override=True)
    registered(QPower, "pow")

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.add(self.a(x) + self.b(x), x).pow(2)

    model, x = Sums().eval(), torch.randn(8, 4)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert {type(m).__name__ for m in prepared.bitwright.functions.children()} == {"QAdd", "QPower"}
    entries = {e.name: e for e in bw.ledger_of(prepared).entries}
    assert entries["pow_1"].output == "uint8 affine tensor"
    assert entries["add"].verdict is entries["add_1"].verdict is Verdict.INTEGER
    bw.calibrate(prepared, [x])
    with torch.no_grad():
        assert 0 < float((prepared(x) - model(x)).abs().max()) < 0.3


def test_a_mixin_class_registered_for_a_module(registered):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return x * self.weight

    class QuantScaled(Scaled, QuantMixin):
        def forward(self, x):
            return self._input_quantizer(x) * self._weight_quantizer(self.weight)

    class QuantTanh(nn.Tanh, QuantInputMixin):
        def forward(self, x):
            return super().forward(self._input_quantizer(x))

    registered(QuantScaled, Scaled)
    registered(QuantTanh, nn.Tanh)
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Tanh(), nn.Linear(4, 2)).eval()
    x = torch.randn(6, 4)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert [type(prepared.get_submodule(n)).__name__ for n in "12"] == ["QuantScaled", "QuantTanh"]
    bw.calibrate(prepared, [x])
    assert prepared.get_submodule("1").weight_quantizer.calibrated
    with torch.no_grad():
        assert 0 < float((prepared(x) - model(x)).abs().max()) < 0.05


def test_a_rule_leaves_a_users_operator_float(registered):
    registered(QGate, Gate)
    model, x = Net().eval(), torch.randn(1, 3, 8, 8)
    prepared = bw.prepare(model, x, skip=["gate"])
    assert type(prepared.gate) is Gate
    entry = next(e for e in bw.ledger_of(prepared).entries if e.name == "gate")
    assert (entry.verdict, entry.reason) == (Verdict.FLOAT, "skipped by the rule 'gate'")


def test_a_users_operator_in_an_island(registered):
    registered(QGate, Gate)

    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Gate(3)

        def forward(self, x):
            return self.gate(x, x) if float(x.sum()) > 1e9 or True else x.tolist()

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Island()

        def forward(self, x):
            return self.inner(x) if x.sum().item() > -1e9 else x

    model, x = Branch().eval(), torch.randn(2, 3, 4, 4)
    prepared = bw.prepare(model, x)
    assert torch.equal(prepared(x), model(x))
    assert isinstance(prepared.inner.gate, QGate)


def test_list_and_unregister(registered):
    registered(QGate, Gate)
    table = list_qmodules()
    assert table[f"{__name__}.QGate"] == ["Gate"]
    assert table["QuantLinear"] == ["Linear"]
    assert "Tensor.add" in table["QuantAdd"]

    class Other(QuantOpr):
        pass

    registered(Other, Gate, override=True)
    assert QMODULES[Gate] is Other


def test_bad_registrations(registered):
    registered(QGate, Gate)
    with pytest.raises(ConfigError, match=r"Gate is registered twice: by .*QGate and by .*Again; pass override=True"):

        @register_qmodule(sources=[Gate])
        class Again(QuantOpr):
            pass

    with pytest.raises(ConfigError, match=r"Conv2d is registered twice: by bitwright\.nn\.conv\.QuantConv2d and by"):
        register_qmodule(sources=[nn.Conv2d])(type("Mine", (QuantOpr,), {}))
    with pytest.raises(ConfigError, match="needs at least one source"):
        register_qmodule(sources=[])
    with pytest.raises(
        ConfigError, match="a source must be a module class, a function or the name of a tensor method, not 3"
    ):
        register_qmodule(sources=[3])
    with pytest.raises(ConfigError, match=r"object is not an nn\.Module: derive it from QuantOpr"):
        register_qmodule(sources=["cumsum"])(object)
    with pytest.raises(ConfigError, match=r"builtins\.object is not registered"):
        unregister_qmodule(object)
    with pytest.raises(ConfigError, match="QuantOpr has no quantizers yet"):
        _ = QuantOpr().input_quantizer


def test_a_constructor_that_fails_is_named(registered):
    class QBad(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self.size = org_module.sizes

    class QuantBad(nn.Tanh, QuantInputMixin):
        pass

    registered(QBad, Gate)
    with pytest.raises(
        ConfigError, match=r"gate: .*QBad cannot be built: AttributeError: 'Gate' object has no attribute"
    ):
        bw.prepare(Net(), torch.randn(1, 3, 8, 8))
    registered(QuantBad, F.relu)
    with pytest.raises(ConfigError, match="to replace a function it must derive from QuantOpr"):
        bw.prepare(Net(), torch.randn(1, 3, 8, 8))
