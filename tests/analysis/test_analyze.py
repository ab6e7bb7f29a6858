"""What analyze measures, against the same computed another way; and that it leaves no trace."""

import gc
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitwright.analysis import LayerStats, analyze, outline
from bitwright.analysis.stats import BINS, Histogram
from bitwright.correction import calibrate
from bitwright.errors import CalibrationError, ConfigError
from bitwright.preparation import Verdict, ledger_of, prepare
from bitwright.quantizer import Mode, quantizers


class Net(nn.Module):
    """A folded BatchNorm, a fused activation, a residual, a functional, a float and a repeated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.matrix = nn.Parameter(torch.randn(6, 8))
        self.gelu, self.fc = nn.GELU(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = x + self.conv2(x)
        x = F.linear(x.mean((2, 3)), self.matrix)
        return self.fc(self.fc(self.gelu(x)))


class Island(nn.Module):
    """Python that cannot be traced, around a part that can and a layer on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.fc(x.mean((2, 3)) * (2.0 if float(x.sum()) > 1e9 else 1.0))


class Masked(nn.Module):
    """Scores of -inf, as in attention."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(x, x.transpose(1, 2)).masked_fill(x > 1.0, -math.inf), -1)


class Unruly(nn.Module):
    """Throws dice, and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.fc(x), p=0.0, training=True)
        x.mul_(0.0)
        return y


class Uneven(nn.Module):
    """Calls its layer one more time in float than quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        quantizing = float(x.sum()) < 1e9 and getattr(self.fc, "weight_quantizer", None) is not None
        if not quantizing or self.fc.weight_quantizer.mode is not Mode.QUANTIZE:
            self.fc(-x)
        return y


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.bn1.running_mean.normal_()
    model.bn1.running_var.uniform_(0.5, 2.0)
    return model.eval()


@pytest.fixture
def model(net: Net) -> nn.Module:
    return calibrate(prepare(net, torch.randn(2, 3, 8, 8)), [torch.randn(4, 3, 8, 8)])


def by_name(stats: list[LayerStats]) -> dict[str, LayerStats]:
    return {s.name: s for s in reversed(stats)}


def expected_db(pairs: list[tuple[Tensor, Tensor]]) -> float:
    signal = sum(float((a.double().numpy() ** 2).sum()) for a, _ in pairs)
    noise = sum(float(((a.double().numpy() - b.double().numpy()) ** 2).sum()) for a, b in pairs)
    return 10 * math.log10(signal / noise)


def seen_by(module: nn.Module, run: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _m, _a, out: seen.append(out.detach().clone()))
    with torch.no_grad():
        for batch in batches:
            run(batch)
    handle.remove()
    return seen


def test_output_sqnr_is_that_of_the_whole_model_up_to_the_layer(net, model):
    batches = [torch.randn(3, 3, 8, 8), 2 * torch.randn(2, 3, 8, 8)]
    stats = by_name(analyze(model, batches))
    float_relu = seen_by(net.relu, net, batches)
    quantized_relu = seen_by(model.bitwright.quantizers.relu, model, batches)
    wanted = expected_db(list(zip(float_relu, quantized_relu, strict=True)))
    # The convolution, its BatchNorm and its activation are one operator on the target.
    assert stats["conv1"].output.sqnr == pytest.approx(wanted, abs=1e-6)
    assert stats["relu"].output.sqnr == pytest.approx(wanted, abs=1e-6)
    assert stats["bn1"].verdict is Verdict.FUSED
    assert stats["bn1"].output.sqnr is None
    last = [s for s in analyze(model, batches) if s.name == "fc"][-1]
    with torch.no_grad():
        outputs = [(net(b), model(b)) for b in batches]
    assert last.output.sqnr == pytest.approx(expected_db(outputs), abs=1e-6)


def test_weight_sqnr_of_a_folded_weight(net, model):
    weight, norm = net.conv1.weight.detach().double().numpy(), net.bn1
    factor = norm.weight.detach().double().numpy() / np.sqrt(norm.running_var.double().numpy() + norm.eps)
    folded = weight * factor.reshape(-1, 1, 1, 1)
    step = np.abs(folded).max((1, 2, 3), keepdims=True) / 63  # int7, narrow
    error = folded - np.round(folded / step) * step
    stats = by_name(analyze(model, [torch.randn(2, 3, 8, 8)]))
    wanted = 10 * math.log10((folded**2).sum() / (error**2).sum())
    assert stats["conv1"].weight.sqnr == pytest.approx(wanted, abs=1e-3)
    assert stats["conv1"].weight.range == pytest.approx((-np.abs(folded).max(), np.abs(folded).max()), rel=1e-5)
    assert stats["conv1"].weight.clipped == 0.0
    assert sum(stats["conv1"].weight.histogram.counts) == weight.size


def test_weight_of_a_function(net, model):
    weight = net.matrix.detach()
    step = weight.abs().amax(1, keepdim=True) / 63
    wanted = expected_db([(weight, torch.round(weight / step) * step)])
    assert by_name(analyze(model, [torch.randn(2, 3, 8, 8)]))["linear"].weight.sqnr == pytest.approx(wanted, abs=1e-3)


def test_clipped_share_and_histogram(net, model):
    batches = [3 * torch.randn(4, 3, 8, 8) for _ in range(3)]
    stats = by_name(analyze(model, batches))
    quantizer = model.bitwright.quantizers.x
    lo, hi = (float(v) for v in quantizer.range())
    values, half = torch.cat([b.flatten() for b in batches]), float(quantizer.scale) / 2
    assert stats["x"].operator == "input"
    assert stats["x"].output.clipped == float(((values < lo - half) | (values > hi + half)).double().mean()) > 0.05
    assert stats["x"].output.range == (lo, hi)
    shown = stats["x"].output.histogram
    assert sum(shown.counts) == values.numel()
    assert len(shown.counts) <= BINS
    edges = shown.lo + (shown.hi - shown.lo) / len(shown.counts) * np.arange(1, len(shown.counts))
    below = [int((values.double().numpy() < edge).sum()) for edge in edges]
    assert np.cumsum(shown.counts)[:-1].tolist() == below


def test_batches_add_up_to_the_whole(model):
    data = torch.randn(6, 3, 8, 8)
    whole, parts = analyze(model, [data]), analyze(model, (data[i : i + 1] for i in range(6)))
    for one, other in zip(whole, parts, strict=True):
        assert one.name == other.name
        assert one.output.clipped == other.output.clipped
        assert (one.output.sqnr is None) == (other.output.sqnr is None)
        if one.output.sqnr is not None:
            assert one.output.sqnr == pytest.approx(other.output.sqnr, abs=1e-3)
        if one.output.histogram is not None:
            assert sum(one.output.histogram.counts) == sum(other.output.histogram.counts)


def test_one_row_for_each_operator_of_the_ledger_in_its_order(model):
    entries = ledger_of(model).entries
    stats = analyze(model, [torch.randn(2, 3, 8, 8)])
    operators = [s for s in stats if s.operator not in ("input", "constant")]
    assert [(s.name, s.verdict) for s in operators] == [(e.name, e.verdict) for e in entries]
    first, second = (s for s in operators if s.name == "fc")
    assert first.output.sqnr != second.output.sqnr
    assert [s.name for s in outline(model)] == [s.name for s in stats]
    assert all(s.output.sqnr is None for s in outline(model))


def test_outline_of_a_model_that_is_not_calibrated(net):
    rows = by_name(outline(prepare(net, torch.randn(2, 3, 8, 8))))
    assert rows["conv1"].weight.spec == "int7 symmetric narrow channel:0"
    assert rows["conv1"].output.spec == "uint8 affine tensor"
    assert rows["conv1"].output.range is None
    assert rows["gelu"].reason == "onnxruntime runs it in float"


def test_islands_and_layers_outside_of_graphs():
    torch.manual_seed(0)
    original, batch = Island().eval(), torch.randn(4, 3, 8, 8)
    model = calibrate(prepare(original, batch), [batch])
    stats = by_name(analyze(model, [batch]))
    with torch.no_grad():
        wanted = expected_db([(original(batch), model(batch))])
    assert stats["fc"].output.sqnr == pytest.approx(wanted, abs=1e-6)
    assert stats["fc"].input.range == pytest.approx([float(v) for v in model.fc.input_quantizer.range()])
    assert stats["fc"].input.histogram is not None
    pairs = zip(
        seen_by(original.body[1], original, [batch]),
        seen_by(model.body.bitwright.quantizers.get_submodule("_1"), model, [batch]),
        strict=True,
    )
    assert stats["body.0"].output.sqnr == pytest.approx(expected_db(list(pairs)), abs=1e-6)
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


def test_infinite_scores_are_no_signal():
    torch.manual_seed(0)
    batch = torch.randn(2, 4, 4)
    stats = analyze(calibrate(prepare(Masked(), batch), [batch * 0.1]), [batch])
    masked = by_name(stats)["masked_fill"]
    assert masked.output.sqnr is not None
    assert math.isfinite(masked.output.sqnr)


def test_nothing_is_left_behind(model):
    found = list(quantizers(model).values())
    found[0].mode, found[1].mode = Mode.OFF, Mode.OBSERVE
    model.train()
    model.conv2.eval()
    modes, training = [q.mode for q in found], [m.training for m in model.modules()]
    state, batches = torch.get_rng_state(), [q.observer.batches for q in found]
    data = torch.ones(2, 3, 8, 8)
    analyze(model, [data])
    with pytest.raises(CalibrationError, match=r"refuses batch 2 \(float32\[2, 5, 8, 8\]\)"):
        analyze(model, [data, torch.ones(2, 5, 8, 8)])
    assert [q.mode for q in found] == modes
    assert [m.training for m in model.modules()] == training
    assert [q.observer.batches for q in found] == batches
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in model.__dict__
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(data, torch.ones(2, 3, 8, 8))


def test_dice_and_writes_into_the_input_do_not_disturb():
    torch.manual_seed(0)
    batch = torch.randn(16, 8)
    recipe = {"schedules": {"remove_dropout": False}}
    model = calibrate(prepare(Unruly(), batch, recipe=recipe), [batch.clone()])
    (dropout,) = (n for n in model.graph.nodes if n.target is F.dropout)
    dropout.args, dropout.kwargs = (dropout.args[0],), {"p": 0.5, "training": True}
    model.recompile()
    wanted = expected_db([(batch, model.bitwright.quantizers.x(batch))])
    given, state = batch.clone(), torch.get_rng_state()
    stats = by_name(analyze(model, [given]))
    assert stats["x"].output.sqnr == pytest.approx(wanted, abs=1e-6)
    assert stats["dropout"].output.sqnr > 25.0  # about 0 dB, were other values dropped
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(given, batch)


def test_a_call_without_a_counterpart_is_not_compared_with_the_next_batch():
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(3)]
    model = calibrate(prepare(Uneven(), batches[0]), batches)
    assert by_name(analyze(model, batches))["fc"].output.sqnr > 25.0


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return self.fc(x) + more["bias"]


def test_inputs_by_name_in_any_order():
    bias, x = torch.randn(8), torch.randn(4, 8)
    model = calibrate(prepare(Named(), {"x": x, "bias": bias}), [{"x": x, "bias": bias}])
    assert by_name(analyze(model, [{"bias": bias, "x": x}]))["fc"].output.sqnr > 25.0


def test_quantizers_that_are_off_stay_off(model):
    batch = torch.randn(2, 3, 8, 8)
    for name, quantizer in quantizers(model).items():
        if name != "bitwright.quantizers.x":
            quantizer.off()
    stats = by_name(analyze(model, [batch]))
    wanted = expected_db([(batch, model.bitwright.quantizers.x(batch))])
    assert stats["x"].output.sqnr == pytest.approx(wanted, abs=1e-6)
    all_on = by_name(analyze(calibrate(model, [batch]), [batch]))
    assert stats["fc"].output.sqnr > all_on["fc"].output.sqnr


def test_activations_of_earlier_batches_are_let_go(model):
    alive = []

    def batches():
        for _ in range(5):
            alive.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
            yield torch.randn(2, 3, 8, 8)

    analyze(model, batches())
    assert len(set(alive[1:])) == 1


def test_refusals(net, model):
    with pytest.raises(CalibrationError, match="the data to analyze with is empty"):
        analyze(model, [])
    with pytest.raises(CalibrationError, match="no quantizer of the model is quantizing: calibrate it"):
        analyze(prepare(net, torch.randn(2, 3, 8, 8)), [torch.randn(2, 3, 8, 8)])
    with pytest.raises(ConfigError, match=r"this Net was not made by bitwright\.prepare"):
        analyze(net, [torch.randn(2, 3, 8, 8)])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    middle=st.sampled_from([0.0, -5.0, 1e6]),
)
def test_histogram_loses_no_value_however_it_grows(seed, sizes, spread, middle):
    random = np.random.default_rng(seed)
    parts = [random.normal(middle, spread * 10.0**i, size) for i, size in enumerate(sizes)]
    first = torch.from_numpy(parts[0])
    histogram = Histogram.over(float(first.min()), float(first.max()))
    for part in parts:
        histogram.add(torch.from_numpy(part))
    values, shown = np.concatenate(parts), histogram.trimmed()
    assert sum(histogram.counts) == sum(shown.counts) == len(values)
    assert 1 <= len(shown.counts) <= BINS
    slack = 1e-9 * max(abs(shown.lo), abs(shown.hi))
    assert shown.lo - slack <= values.min()
    assert values.max() <= shown.hi + slack


def test_trimmed_keeps_the_range():
    histogram = Histogram.over(-10.0, 30.0)
    histogram.add(torch.linspace(0.0, 1.0, 100))
    alone, with_range = histogram.trimmed(), histogram.trimmed((-4.0, 4.0))
    assert (alone.lo, alone.hi) == pytest.approx((0.0, 1.0), abs=0.05)
    assert with_range.lo <= -4.0
    assert with_range.hi >= 4.0
    assert sum(alone.counts) == sum(with_range.counts) == 100
