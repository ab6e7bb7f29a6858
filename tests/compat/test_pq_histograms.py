"""The histogram calibrator by its old names: thresholds by the written-out formulas, number by number."""

import numpy as np
import pytest
import torch
from torch import nn

from bitwright.compat.pytorch_quantization import calib
from bitwright.compat.pytorch_quantization.nn import QuantConv2d, QuantLinear, TensorQuantizer
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from bitwright.errors import CalibrationError, ConfigError


def collected(*batches, bits=8, unsigned=False, **options):
    calibrator = calib.HistogramCalibrator(bits, None, unsigned, **options)
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def outlier(count=700):
    x = torch.rand(count)
    x[3] = 10.0
    return x


@pytest.mark.parametrize("scales", [(1, 1), (1, 2.5), (3, 1), (1, 1.0001), (1, 7)])
def test_bins_have_the_width_of_the_first_batch(scales):
    x, y = (torch.rand(1000) * k - 0.2 for k in scales)
    calibrator = collected(x, y, num_bins=50)
    first, width = float(x.abs().max()), float(x.abs().max()) / 50
    bins = max(50, int(np.ceil(float(y.abs().max()) / width - 1e-6)))
    edges = calibrator._calib_bin_edges
    assert calibrator._calib_hist.numel() == bins == edges.numel() - 1
    assert np.allclose(edges.numpy(), np.arange(bins + 1) * width, rtol=1e-6)
    counts, _ = np.histogram(torch.cat([x, y]).abs().numpy(), bins=edges.numpy())
    assert np.abs(calibrator._calib_hist.numpy() - counts).sum() <= 4  # values on an edge
    assert int(calibrator._calib_hist.sum()) == 2000
    assert first <= float(edges[50]) * (1 + 1e-6)


@pytest.mark.parametrize("percentile", [0.0, 50.0, 90.0, 99.9, 100.0])
def test_percentile_is_the_lower_edge_of_the_bin(percentile):
    calibrator = collected(torch.randn(5000), 1.5 * torch.randn(5000))
    counts, edges = calibrator._calib_hist.numpy(), calibrator._calib_bin_edges.numpy()
    share = np.cumsum(counts / counts.sum())
    expected = edges[np.searchsorted(share, percentile / 100)]
    assert float(calibrator.compute_amax("percentile", percentile=percentile)) == pytest.approx(expected, rel=1e-6)
    whole = collected(torch.arange(100.0))
    assert abs(float(whole.compute_amax("percentile", percentile=90)) - 89) < 100 / 2048


@pytest.mark.parametrize(("bits", "unsigned"), [(8, False), (4, True), (3, False)])
def test_mse_tries_the_centre_of_every_bin(bits, unsigned):
    calibrator = collected(torch.randn(3000).abs() ** 2, bits=bits, unsigned=unsigned, num_bins=200)
    counts, edges = calibrator._calib_hist.double(), calibrator._calib_bin_edges
    centers = (edges[1:] + edges[:-1]) / 2
    top = 2 ** (bits - 1 + unsigned) - 1
    errors = {}
    for i in range(20, 200, 3):
        scale = torch.tensor(float(top)) / centers[i]
        rounded = torch.round(centers * scale).clamp(0, top) / scale
        errors[i] = float(((rounded - centers).double() ** 2 * counts).sum())
    best = min(errors, key=errors.get)
    amax = calibrator.compute_amax("mse", stride=3, start_bin=20)
    assert float(amax) == pytest.approx(float(centers[best]), rel=1e-6)


def divergence(counts, cut, levels):
    """The divergence of the first bins, at this many levels, from all bins."""
    kept = counts[:cut]
    level = np.digitize(range(cut), np.linspace(0, cut, levels + 1)) - 1
    candidate = np.zeros(cut)
    for k in range(levels):
        members = [j for j in range(cut) if level[j] == k and kept[j] > 0]
        if members:
            candidate[members] = kept[members].sum() / len(members)
    reference = kept.copy()
    reference[-1] += counts[cut:].sum()
    p, q = reference / reference.sum(), candidate / candidate.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0).sum()


@pytest.mark.parametrize(("bits", "unsigned"), [(8, False), (7, True), (4, False)])
def test_entropy_takes_the_last_of_the_best_cuts(bits, unsigned):
    for x in (outlier(), torch.randn(4000), torch.rand(3000) ** 3):
        calibrator = collected(x, bits=bits, unsigned=unsigned, num_bins=400)
        counts, edges = calibrator._calib_hist.double().numpy().copy(), calibrator._calib_bin_edges
        counts[0] = counts[1]
        cuts = list(range(130, 401, 5))
        found = [divergence(counts, cut, 2 ** (bits - 1 + unsigned)) for cut in cuts]
        best = max(cut for cut, value in zip(cuts, found, strict=True) if value <= min(found))
        amax = calibrator.compute_amax("entropy", start_bin=130, stride=5)
        assert float(amax) == float(edges[best])


@pytest.mark.parametrize("unsigned", [False, True])
def test_one_outlier_is_cut_off(unsigned):
    assert float(collected(outlier(), unsigned=unsigned).compute_amax("entropy")) < 1.1
    values = torch.full((700,), 255.0)
    values[3] = 256.0
    assert abs(float(collected(values, values).compute_amax("mse")) - 255) < 0.5


def test_zeros_tiny_batches_and_what_is_no_number():
    x = torch.rand(5000)
    assert collected().compute_amax("mse") is None
    assert collected(torch.zeros(3), skip_zeros=True).compute_amax("mse") is None
    assert float(collected(torch.zeros(3)).compute_amax("entropy")) == 0
    late = collected(torch.zeros(100), x)
    assert int(late._calib_hist.sum()) == 5100
    assert int(late._calib_hist[0]) >= 100
    tiny = collected(torch.full((10,), 1e-9), x)
    assert tiny._calib_hist.numel() <= 2**15
    assert int(tiny._calib_hist.sum()) == 5010
    assert float(tiny.compute_amax("percentile", percentile=50)) == pytest.approx(0.5, abs=0.03)
    odd = collected(x, torch.tensor([float("inf")]))
    with pytest.raises(CalibrationError, match="NaN or infinity was seen"):
        odd.compute_amax("mse")
    with pytest.raises(ConfigError, match=r"start_bin 128 is beyond the 19 bins"):
        collected(x, num_bins=19).compute_amax("entropy")
    for wrong in (-10, 200):
        with pytest.raises(ValueError, match="Must be in range"):
            collected(x).compute_amax("percentile", percentile=wrong)


def test_what_two_have_seen_is_joined_and_kept():
    x, y = torch.rand(4000), 3 * torch.rand(4000)
    one, other = collected(x, num_bins=500), collected(y, num_bins=500)
    one.merge(other)
    assert int(one._calib_hist.sum()) == 8000
    both = torch.cat([x, y])
    width = float(other._calib_bin_edges[1])
    found = float(one.compute_amax("percentile", percentile=70))
    assert found == pytest.approx(float(both.quantile(0.7)), abs=2 * width)
    fresh = calib.HistogramCalibrator(8, None, False, num_bins=500)
    fresh.load_state_tensors(one.state_tensors())
    assert float(fresh.compute_amax("percentile", percentile=70)) == found
    one.reset()
    assert one.compute_amax("percentile") is None


def test_quantizers_and_weights_use_it():
    quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"), if_calib=True, if_quant=False)
    quantizer(outlier())
    quantizer.load_calib_amax("entropy")
    assert float(quantizer.amax) < 1.1
    assert float(quantizer.amax) == float(quantizer._calibrator.compute_amax("entropy"))
    layer = QuantConv2d(3, 5, 3)
    for method in ("percentile", "mse"):
        calib.calibrate_weights(layer, method, percentile=99.0)
        each = [collected(layer.weight[i].detach()).compute_amax(method, percentile=99.0) for i in range(5)]
        assert torch.equal(layer.weight_quantizer.amax.flatten(), torch.stack(each))


def test_all_modules_named_quantizer_are_quantizers():
    model = nn.Sequential(QuantLinear(4, 4), nn.ReLU(), QuantConv2d(3, 3, 1))
    named = {name: module for name, module in model.named_modules() if "quantizer" in name}
    assert len(named) == 4
    assert all(isinstance(module, TensorQuantizer) for module in named.values())
    for module in named.values():
        module.disable()
    learned = TensorQuantizer(QuantDescriptor(amax=1.0, learn_amax=True))
    assert len(list(learned.parameters())) == 2
    assert [module for module in learned.modules() if module is not learned] == [learned.method]
