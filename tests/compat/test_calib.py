"""Calibrators against independent formulas, and the helpers for training."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.compat.pytorch_quantization.calib import calibrate_weights
from bitwright.compat.pytorch_quantization.optim import helper
from bitwright.errors import CalibrationError, ConfigError
from bitwright.quantizer import QuantDescriptor, TensorQuantizer
from bitwright.quantizer.calibrators import HistogramCalibrator, MaxCalibrator


class Layer(nn.Linear):
    def __init__(self, quantizer, rows=4, columns=50):
        super().__init__(columns, rows)
        self.weight_quantizer = quantizer


# ---------------------------------------------------------------------------------------------------- max


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (-1,)])
def test_max_is_the_largest_magnitude(axis):
    torch.manual_seed(0)
    batches = [torch.randn(3, 4, 5) * k for k in (1, 3, 2)]
    calibrator = MaxCalibrator(8, axis, False, track_amax=True)
    assert calibrator.compute_amax() is None
    for batch in batches:
        calibrator.collect(batch)
    kept = () if axis is None else tuple(a % 3 for a in ((axis,) if isinstance(axis, int) else axis))
    reduced = tuple(d for d in range(3) if d not in kept)
    each = [np.abs(b.numpy()).max(axis=reduced, keepdims=bool(kept)) for b in batches]
    assert np.array_equal(calibrator.compute_amax().numpy(), np.maximum.reduce(each))
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(calibrator.amaxs, each, strict=True))
    assert repr(calibrator).endswith("3 batches)")
    calibrator.reset()
    assert calibrator.compute_amax() is None
    assert calibrator.amaxs == []


def test_max_refusals():
    calibrator = MaxCalibrator(8, 0, False)
    calibrator.collect(torch.ones(2, 3))
    with pytest.raises(CalibrationError, match=r"shape changed: \(2,\) channels before, now \(4,\) for .* \(4, 3\)"):
        calibrator.collect(torch.ones(4, 3))
    with pytest.raises(ConfigError, match=r"axis 2 .*is out of range for a tensor of shape \(2, 3\)"):
        MaxCalibrator(8, 2, False).collect(torch.ones(2, 3))


# ---------------------------------------------------------------------------------------------- histograms


def collected(*batches, **options):
    calibrator = HistogramCalibrator(8, None, False, **options)
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def test_the_histogram_is_that_of_all_batches():
    torch.manual_seed(0)
    x, y = torch.randn(5000), torch.randn(9000) * 2.5
    calibrator = collected(x, y, num_bins=100)
    hist, edges = calibrator._calib_hist, calibrator._calib_bin_edges
    counts, _ = np.histogram(torch.cat([x, y]).abs().numpy(), bins=edges.numpy())
    assert hist.tolist() == counts.tolist()
    assert hist.numel() >= 100
    assert float(edges[-2]) <= float(y.abs().max()) <= float(edges[-1])
    backwards = collected(y, x, num_bins=100)
    assert torch.equal(backwards._calib_hist, hist)
    merged, other = collected(x, num_bins=100), collected(y, num_bins=100)
    merged.merge(other)
    assert torch.equal(merged._calib_hist, hist)
    assert merged.batches == 2


@pytest.mark.parametrize("first", [0.5, 1e-3, 1e-9, 1e-30, 0.0])
def test_a_tiny_first_batch(first):
    torch.manual_seed(0)
    x = torch.rand(20000)
    calibrator = collected(torch.full((100,), first), x)
    hist, edges = calibrator._calib_hist, calibrator._calib_bin_edges
    assert int(hist.sum()) == 20100
    assert 2048 <= hist.numel() <= 8 * 2048
    assert hist.numel() == edges.numel() - 1
    assert float(x.max()) <= float(edges[-1]) <= 1.01
    for method in ("entropy", "mse", "percentile"):
        assert float(calibrator.compute_amax(method)) == pytest.approx(1.0, abs=0.03)
    assert float(calibrator.compute_amax("percentile", percentile=50)) == pytest.approx(0.5, abs=0.02)


def test_zeros():
    x = torch.cat([torch.zeros(90), torch.ones(10)])
    assert float(collected(x).compute_amax("percentile", percentile=89)) == 0
    assert int(collected(x, skip_zeros=True)._calib_hist.sum()) == 10
    assert collected(torch.zeros(3), skip_zeros=True).compute_amax("mse") is None
    assert float(collected(torch.zeros(3)).compute_amax("entropy")) == 0


@pytest.mark.parametrize("percentile", [0.0, 10.0, 50.0, 99.0, 99.99, 100.0])
def test_percentile_covers_its_share(percentile):
    torch.manual_seed(0)
    x = torch.randn(10000)
    calibrator = collected(x)
    amax = float(calibrator.compute_amax("percentile", percentile=percentile))
    width = float(x.abs().max()) / 2048
    assert amax == pytest.approx(float(x.abs().quantile(percentile / 100)), abs=2 * width + 1e-3)


@pytest.mark.parametrize(("bits", "unsigned"), [(4, False), (8, True)])
def test_mse_is_as_good_as_the_best_of_all_centres(bits, unsigned):
    torch.manual_seed(0)
    x = torch.randn(5000).abs() ** 2
    calibrator = HistogramCalibrator(bits, None, unsigned, num_bins=300)
    calibrator.collect(x)
    top, end = 2 ** (bits - 1 + unsigned) - 1, float(x.max())

    def error(amax):
        return float((torch.round(x.double() * top / amax).clamp(0, top) * amax / top - x).square().sum())

    best = min(error(end * (i + 0.5) / 300) for i in range(30, 300, 3))
    assert error(float(calibrator.compute_amax("mse", stride=3, start_bin=30))) <= 1.01 * best


def naive_entropy(counts, levels, start, stride):
    """The divergence for every cut, bin by bin."""
    bins = counts.copy()
    bins[0] = bins[1]
    found = []
    for cut in range(start, len(bins) + 1, stride):
        level = np.digitize(range(cut), np.linspace(0, cut, levels + 1)) - 1
        candidate = np.zeros(cut)
        for k in range(levels):
            members = [j for j in range(cut) if level[j] == k and bins[j] > 0]
            if members:
                candidate[members] = bins[members].sum() / len(members)
        reference = bins[:cut].copy()
        reference[-1] += bins[cut:].sum()
        p, q = reference / reference.sum(), candidate / candidate.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append((cut, np.where(p > 0, p * np.log(p / q), 0).sum()))
    return found


@pytest.mark.parametrize(("bits", "unsigned"), [(4, False), (3, True), (6, False)])
def test_entropy_is_near_that_of_the_plain_loop(bits, unsigned):
    # The loss is flat around its minimum, and histograms with other bins put that elsewhere.
    torch.manual_seed(bits)
    for x in (torch.randn(50_000), torch.randn(50_000) ** 3, torch.rand(50_000)):
        calibrator = HistogramCalibrator(bits, None, unsigned, num_bins=512)
        calibrator.collect(x)
        counts, edges = np.histogram(x.abs().numpy(), bins=512, range=(0, float(x.abs().max())))
        found = naive_entropy(counts.astype(float), 2 ** (bits - 1 + unsigned), 64, 4)
        cut = min(found, key=lambda pair: pair[1])[0]
        assert float(calibrator.compute_amax("entropy", start_bin=64)) == pytest.approx(edges[cut], rel=0.15)


def test_choosing_is_quick():
    torch.manual_seed(0)
    calibrator = collected(torch.randn(200_000))
    for method in ("entropy", "mse"):
        begin = time.perf_counter()
        assert 2 < float(calibrator.compute_amax(method)) < 5
        assert time.perf_counter() - begin < 3


def test_fp8_histograms():
    calibrator = HistogramCalibrator((4, 3), None, False)
    calibrator.collect(torch.linspace(-1, 1, 1000))
    assert 0.5 < float(calibrator.compute_amax("mse")) <= 1
    with pytest.raises(ConfigError, match="entropy needs integers, and 'e4m3 symmetric tensor' has none"):
        calibrator.compute_amax("entropy")


def test_histogram_refusals():
    assert HistogramCalibrator(8, None, False).compute_amax("mse") is None
    with pytest.raises(NotImplementedError, match="only supports per tensor scaling, not axis 0"):
        HistogramCalibrator(8, 0, False)
    with pytest.raises(ConfigError, match=r"a histogram needs at least 1 bin and at most 2..17, not 0"):
        HistogramCalibrator(8, None, False, num_bins=0)
    calibrator = collected(torch.ones(3))
    with pytest.raises(TypeError, match="Unknown calibration method 'entropi': did you mean 'entropy'"):
        calibrator.compute_amax("entropi")
    with pytest.raises(ConfigError, match=r"Invalid percentile. Must be in range 0 <= percentile <= 100, not 101"):
        calibrator.compute_amax("percentile", percentile=101)
    with pytest.raises(ConfigError, match="stride and start_bin must be at least 1, not 0 and 128"):
        calibrator.compute_amax("mse", stride=0)
    calibrator.collect(torch.tensor([float("nan")]))
    with pytest.raises(CalibrationError, match="NaN or infinity was seen"):
        calibrator.compute_amax("mse")


# -------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("perchannel", [True, False])
@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_calibrate_weights(method, perchannel):
    torch.manual_seed(0)
    described = Layer(TensorQuantizer(QuantDescriptor(axis=0 if perchannel else None)))
    plain = Layer(TensorQuantizer("int8 channel:0" if perchannel else "int8"))
    model = nn.Sequential(described, nn.ReLU(), plain)
    calibrate_weights(model, method, perchannel, percentile=90.0, num_bins=500)
    for layer in (described, plain):
        magnitude = layer.weight.detach().abs()
        largest = magnitude.amax(1) if perchannel else magnitude.max()
        quantizer = layer.weight_quantizer
        amax = quantizer.qparams()[0] * 127
        assert amax.shape == largest.shape
        if method == "max":
            assert torch.allclose(amax, largest)
        elif method == "percentile":
            share = (magnitude <= amax.reshape(-1, 1) + 1e-3).float().mean()
            assert 0.88 <= float(share) <= 0.95
        else:
            assert bool((amax <= largest * 1.0001).all() & (amax > largest * 0.8).all())
    assert described.weight_quantizer.amax.shape == ((4, 1) if perchannel else ())


def test_calibrate_weights_of_a_transposed_convolution():
    layer = nn.ConvTranspose1d(3, 5, 2)
    layer.weight_quantizer = TensorQuantizer(QuantDescriptor(axis=1))
    calibrate_weights(layer, "max")
    assert torch.equal(layer.weight_quantizer.amax, layer.weight.detach().abs().amax((0, 2), keepdim=True))
    with torch.no_grad():
        layer.weight[:, 2] = 0
    calibrate_weights(layer, "percentile")
    assert layer.weight_quantizer.amax.reshape(-1)[2] == 0
    assert layer.weight_quantizer(layer.weight)[:, 2].abs().max() == 0
    with pytest.raises(TypeError, match="Unsupported calibration method 'msee': did you mean 'mse'"):
        calibrate_weights(layer, "msee")


# ------------------------------------------------------------------------------------------- optim.helper


def names(model, patterns):
    known = {parameter: name for name, parameter in model.named_parameters()}
    return [known[parameter] for parameter in helper.match_parameters(model, patterns)]


def test_parameters_by_pattern():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    assert names(model, ["weight"]) == ["0.weight", "1.weight", "2.weight"]
    assert names(model, [r"^0\.", "bias"]) == ["0.weight", "0.bias", "1.bias"]
    assert names(model, ["*.bias"]) == ["0.bias", "1.bias"]
    groups = helper.group_parameters(model, [["bias"], ["weight"]], lrs=[0.1, 0.2], weight_decays=[0.0, 1e-4])
    assert [len(g["params"]) for g in groups] == [2, 3]
    assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == [
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.2, "weight_decay": 1e-4},
    ]
    assert torch.optim.SGD(groups, lr=1.0).param_groups[0]["lr"] == 0.1
    helper.freeze_parameters(model, [r"^0\."])
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True]
    with pytest.raises(TypeError, match="lr must match the groups: they are 2, its values 1"):
        helper.group_parameters(model, [["bias"], ["weight"]], lrs=[0.1])
    with pytest.raises(TypeError, match=r"must be list of list of patterns: write \['bias'\], not"):
        helper.group_parameters(model, ["bias"])
    with pytest.raises(ConfigError, match=r"no remaining parameter matches the patterns \['gamma'\] of group 1"):
        helper.group_parameters(model, [["bias"], ["gamma"]])


def test_quantizing_weights_in_place():
    layer = Layer(TensorQuantizer(QuantDescriptor(num_bits=4, axis=0)))
    expected = layer.weight_quantizer(layer.weight).detach()
    assert not torch.equal(expected, layer.weight)
    helper.quant_weight_inplace(layer)
    assert torch.equal(layer.weight, expected)
    assert torch.equal(layer.weight_quantizer(layer.weight), expected)
    assert layer.weight_quantizer._disabled
    assert layer.weight.requires_grad
