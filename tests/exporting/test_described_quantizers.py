"""TensorQuantizers placed by hand in a forward: calibrated, exported, and refused where no file can say them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import CalibrationError, ExportError
from bitwright.exporting.parts import as_integers
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer


class Pooled(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.quantizer = TensorQuantizer(QuantDescriptor(**fields))

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.quantizer(self.conv(x)), 3)


@pytest.mark.parametrize("fields", [{}, {"calib_method": "histogram"}, {"learn_amax": True}, {"amax": 0.9}])
def test_placed_by_hand_it_calibrates_and_exports(fields, tmp_path):
    torch.manual_seed(0)
    net, x = Pooled(**fields).eval(), torch.randn(4, 3, 11, 11)
    prepared = bw.prepare(net, x, "onnxruntime")
    bw.calibrate(prepared, [x])
    quantizer = prepared.get_submodule("quantizer")
    assert type(quantizer) is TensorQuantizer
    assert quantizer.mode is Mode.QUANTIZE
    if "amax" in fields:
        assert float(quantizer.qparams()[0] * 127) == pytest.approx(0.9)
    else:
        assert 0.5 < float(quantizer.qparams()[0] * 127) < 5
    path = bw.export(prepared, tmp_path / "pooled.onnx")
    with torch.no_grad():
        expected = prepared(x)
    step = float(quantizer.qparams()[0])
    assert float((bw.run_file(path)(x) - expected).abs().max()) <= step
    assert not net.quantizer.calibrated or fields  # the user's model is left alone


def test_a_failed_calibration_leaves_it_as_it_was():
    x = torch.randn(2, 3, 11, 11)
    for fields in ({}, {"fake_quant": False}):
        prepared = bw.prepare(Pooled(**fields).eval(), x, "onnxruntime")
        quantizer = prepared.get_submodule("quantizer")
        with pytest.raises(CalibrationError, match=r"calibration batch 1 produces NaN or infinity"):
            bw.calibrate(prepared, [x * float("nan")])
        assert quantizer.mode is Mode.QUANTIZE
        assert quantizer.amax is None
        assert quantizer._calibrator.batches == 0


def test_what_is_multiplied_before_is_in_the_file(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 11, 11)
    prepared = bw.prepare(Pooled().eval(), x, "onnxruntime")
    bw.calibrate(prepared, [x])
    quantizer = prepared.get_submodule("quantizer")
    quantizer.pre_quant_scale = torch.linspace(0.5, 1.5, 8).reshape(1, 8, 1, 1)
    path = bw.export(prepared, tmp_path / "m.onnx")
    with torch.no_grad():
        expected = prepared(x)
    step = float(quantizer.qparams()[0])
    assert float((bw.run_file(path)(x) - expected).abs().max()) <= step
    proof = bw.verify(prepared, path, [x], latency=False)
    assert proof.ok, proof
    weight = torch.randn(4, 3)
    smooth = TensorQuantizer(QuantDescriptor(axis=0))
    smooth.pre_quant_scale = torch.tensor([0.5, 1.0, 2.0])
    smooth.amax = torch.full((4, 1), 3.0)
    assert torch.equal(as_integers(weight, smooth)(), smooth(weight))


@pytest.mark.parametrize("what", ["integers", "several axes"])
def test_what_no_file_can_say_is_refused(what, tmp_path):
    x = torch.randn(2, 3, 11, 11)
    fields = {"integers": {"fake_quant": False}, "several axes": {"axis": (0, 1)}}.get(what, {})
    prepared = bw.prepare(Pooled(**fields).eval(), x, "onnxruntime")
    bw.calibrate(prepared, [x])
    why = {
        "integers": "has no uniform grid, and no table",
        "several axes": "keeps ranges along several axes",
    }[what]
    with pytest.raises(ExportError, match=rf"the quantizer of .* \(AmaxFakeQuantize\) {why}"):
        bw.export(prepared, tmp_path / "m.onnx")


@pytest.mark.parametrize("fields", [{"axis": 0}, {"num_bits": 4, "axis": 0, "narrow_range": True}, {"amax": 0.4}])
def test_integers_of_a_file_are_those_of_the_simulation(fields):
    torch.manual_seed(0)
    weight = torch.randn(16, 3, 3, 3)
    quantizer = TensorQuantizer(QuantDescriptor(**fields))
    quantizer.observe()
    quantizer(weight)
    quantizer.compute_qparams()
    quantizer.quantize()
    assert torch.equal(as_integers(weight, quantizer)(), quantizer(weight))
