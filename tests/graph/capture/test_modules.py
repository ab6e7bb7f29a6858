"""Capture: modules with state, hooks and containers, compiled ones, and whole transformers and recurrent layers."""

import collections

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import bitwright as bw
from bitwright.exporting.deploy import deploy
from bitwright.graph import CapturedModel, capture_model
from bitwright.nn import QuantLinear
from bitwright.preparation import Verdict
from tests.graph.capture.capturing import Net, image, prepared, same


class Buffered(nn.Module):
    """Buffers that forward gives other values: set anew, added to, written into, grown."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(4, 3), persistent=False)
        self.register_buffer("grown", torch.zeros(0, 3), persistent=False)
        self.plain = torch.zeros(3)

    def forward(self, x):
        x = self.fc(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1
        self.ring[1] = x[0]
        self.plain.add_(x[0])
        self.grown = torch.cat([self.grown, x[:1]])
        return x - self.mean + self.ring.sum(0) * self.calls + self.grown.sum(0) + self.plain


def test_buffers_that_forward_updates():
    model = nn.Sequential(nn.Linear(3, 3), Buffered()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == {}
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 3)
            assert torch.equal(quantized(x), model(x))
    for name in ("mean", "calls", "ring", "grown"):
        assert torch.equal(getattr(quantized.get_submodule("1"), name), getattr(model[1], name))
    assert int(model[1].calls) == 4


class Remembering(nn.Module):
    """Keeps what it saw in plain Python: a cache in a list, a number of calls, the last result."""

    def __init__(self, reads):
        super().__init__()
        self.fc, self.reads = nn.Linear(3, 3), reads
        self.calls, self.seen, self.last = 0, [], None

    def forward(self, x):
        x = self.fc(x)
        self.calls += 1
        self.seen.append(x)
        self.last = x
        return x + sum(self.seen) * self.calls if self.reads else x


@pytest.mark.parametrize("reads", [False, True])
def test_state_in_plain_python(reads):
    """Where the result depends on it the module runs as written; where nobody reads it the graph goes on filling it."""
    model = nn.Sequential(nn.Linear(3, 3), Remembering(reads), nn.ReLU()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == ({"1": "it keeps state from call to call"} if reads else {})
    assert (model[1].calls, model[1].seen, quantized.get_submodule("1").seen) == (0, [], [])
    assert isinstance(quantized.get_submodule("1.fc"), QuantLinear)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(quantized(x), model(x))
    assert same(quantized.get_submodule("1").seen, model[1].seen)


class Memo(nn.Module):
    """Computes something at its first call, and keeps it in a dict: a table of biases, or what it saw first."""

    def __init__(self, of_data):
        super().__init__()
        self.fc, self.of_data = nn.Linear(3, 3), of_data
        self.table, self.kept = nn.Parameter(torch.randn(5)), {}
        self.register_buffer("places", torch.tensor([4, 0, 2]))

    def forward(self, x):
        key = str(x.device)
        if key not in self.kept:
            self.kept[key] = self.fc(x)[0] if self.of_data else self.table[self.places]
        return self.fc(x) + self.kept[key]


def test_what_is_computed_from_parameters_once_and_kept_is_part_of_the_graph():
    model = nn.Sequential(nn.Linear(3, 3), Memo(of_data=False), nn.ReLU()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == {}
    assert (model[1].kept, quantized.get_submodule("1").kept) == ({}, {})
    with torch.no_grad():
        quantized.get_submodule("1").table.mul_(2)  # the graph sees what is trained or loaded
        model[1].table.mul_(2)
        for size in (2, 4):
            x = torch.randn(size, 3)
            assert torch.equal(quantized(x), model(x))


def test_what_is_computed_from_data_once_and_kept_is_not():
    model = nn.Sequential(nn.Linear(3, 3), Memo(of_data=True), nn.ReLU()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    assert bw.ledger_of(quantized).islands == {"1": "it keeps state from call to call"}
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(quantized(x), model(x))


def test_containers_of_modules_and_parameters():
    class Contained(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
            self.heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
            self.shifts = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
            self.gains = nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(2))})

        def forward(self, x):
            for step, shift in zip(self.steps[1:], self.shifts, strict=False):
                x = step(x) + shift
            x = x * self.shifts[-1] + len(self.steps)
            return {name: head(x) * self.gains[name] for name, head in self.heads.items()}

    model = Contained()
    quantized = prepared(model, torch.randn(2, 3), torch.randn(5, 3))
    sum(v.sum() for v in quantized(torch.randn(2, 3)).values()).backward()
    unused = {n for n, p in quantized.named_parameters() if p.grad is None}
    assert unused == {"steps.0.weight", "steps.0.bias"}


def test_a_parameter_read_without_being_traced_is_not_frozen():
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x), x.sum() * 0 + sum(p.pow(2).sum() for p in self.parameters())

    model = Penalized().eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    with torch.no_grad():
        quantized.fc.weight.mul_(2)
        model.fc.weight.mul_(2)
    x = torch.randn(2, 3)
    assert same(quantized(x), model(x))
    quantized(x)[1].backward()
    assert quantized.fc.weight.grad is not None


def test_hooks_of_every_kind_are_kept():
    calls = collections.Counter()
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.ReLU()).eval()

    def count(name, result=None):
        return lambda module, *rest: calls.update([name]) or (result(*rest) if result else None)

    model[0].register_forward_pre_hook(count("pre", lambda args: (args[0] * 2,)))
    model[0].register_forward_hook(count("forward", lambda args, out: out + 1))
    model[0].register_full_backward_hook(count("backward", lambda given, out: (given[0] * 5,)))
    model[1].register_forward_hook(count("inner", lambda args, out: out - 1))
    quantized = prepared(model, torch.randn(2, 3), torch.randn(4, 3))
    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    calls.clear()
    quantized(x).sum().backward()
    assert calls["pre"] == calls["forward"] == calls["backward"] == 1
    model(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["before a norm", "norm", "activation"])
@pytest.mark.parametrize("change", [torch.Tensor.mul, torch.Tensor.mul_], ids=["returns", "writes"])
def test_a_layer_whose_hook_changes_its_result_stays_whole(layer, change):
    """No fold may cross it, and files must hold what it does."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval(), image()
    model[1].running_mean.normal_()
    model[layer].register_forward_hook(lambda module, args, out: change(out, 2.0))
    model[3].register_forward_hook(lambda module, args, out: None)
    quantized = prepared(model, x)
    entries = {e.name: e for e in bw.ledger_of(quantized).entries}
    assert entries[str(layer)].reason == "a leaf because its hooks change what it reads or returns"
    assert entries["3"].verdict is Verdict.INTEGER
    bw.calibrate(quantized, [x])
    with torch.no_grad():
        assert torch.allclose(deploy(quantized).model(x), model(x), atol=0.1)


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}], ids=repr)
def test_an_attribute_may_be_called_hooks(value):
    model = Net(lambda self, x: self.conv(x)).eval()
    model.feature_hooks = model._my_forward_hooks = value
    quantized = prepared(model, image())
    assert same(quantized.feature_hooks, value)


def test_a_compiled_module_is_a_leaf():
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
    captured = capture_model(model, torch.randn(2, 3))
    assert isinstance(captured.model, CapturedModel)
    x = torch.randn(4, 3)
    assert torch.equal(captured.model(x), model(x))


@pytest.mark.parametrize("masked", [False, True])
def test_a_whole_transformer(masked):
    class Translating(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
            self.head = nn.Linear(8, 5)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) if masked else None
            return self.head(self.body(source, target, tgt_mask=mask, tgt_is_causal=masked))

    def inputs(batch, length):
        return torch.randn(batch, 4, 8), torch.randn(batch, length, 8)

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        prepared(Translating(), inputs(2, 3), inputs(3, 3), inputs(1, 6))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_recurrent_layers_with_states():
    class Tagging(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.gru = nn.GRU(8, 4)
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x, state=None):
            out, (h, c) = self.lstm(x, state)
            out, last = self.gru(out.transpose(0, 1))
            return self.cell(out[-1], last.squeeze(0)), h, {"c": c}

    prepared(Tagging(), torch.randn(2, 5, 3), torch.randn(3, 7, 3))
    state = torch.zeros(4, 2, 4), torch.ones(4, 2, 4)
    prepared(Tagging(), (torch.randn(2, 5, 3), state), (torch.randn(2, 6, 3), state))
