"""Code written for pytorch-quantization: doubles, recurrent layers, checkpoints, the old helpers, and files."""

import io

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from bitwright.compat import pytorch_quantization as pq
from bitwright.compat.pytorch_quantization import calib, cuda_ext, quant_modules, tensor_quant
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor


def rounded(x, amax, bits=8):
    """What a quantizer gives, written out, in the precision of ``x``."""
    scale = torch.tensor(2.0 ** (bits - 1) - 1) / amax
    return torch.clamp(torch.round(x * scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) / scale


def calibrate(model, x):
    quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.enable_calib()
        quantizer.disable_quant()
    model(x)
    for quantizer in quantizers:
        quantizer.disable_calib()
        quantizer.load_calib_amax()
        quantizer.enable_quant()
    return model


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("stored", [True, False])
def test_doubles_are_computed_in_double(axis, stored):
    x = torch.randn(3, 50, dtype=torch.double)
    amax = x.abs().amax(1, keepdim=True) if axis == 0 else x.abs().max()
    quantizer = TensorQuantizer(QuantDescriptor(axis=axis))
    if stored:
        calibrate(quantizer, x)
        assert quantizer.amax.dtype == torch.double
        assert torch.equal(quantizer.amax, amax)
    assert torch.equal(quantizer(x), rounded(x, amax))
    unsigned = TensorQuantizer(QuantDescriptor(unsigned=True))(x.abs())
    scale = torch.tensor(255.0) / x.abs().max()
    assert torch.equal(unsigned, torch.round(x.abs() * scale).clamp(0, 255) / scale)


def test_a_double_layer_is_the_written_out_formula():
    layer = quant_nn.QuantLinear(7, 5).double()
    x = torch.randn(4, 7, dtype=torch.double)
    weight = rounded(layer.weight, layer.weight.abs().amax(1, keepdim=True))
    expected = rounded(x, x.abs().max()) @ weight.T + layer.bias
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["LSTMCell", "LSTM", "GRU"])
def test_without_a_range_input_and_hidden_state_have_one(kind):
    options = {"quant_desc_input": QuantDescriptor(4), "quant_desc_weight": QuantDescriptor(4)}
    layer = getattr(quant_nn, f"Quant{kind}")(5, 3, **options)
    x, h, c = torch.randn(2, 5), 4 * torch.randn(2, 3), torch.randn(2, 3)
    both = rounded(torch.cat([x, h], 1), torch.cat([x, h], 1).abs().max(), 4)
    reference = getattr(nn, kind)(5, 3)
    reference.load_state_dict(layer.state_dict())
    suffix = "" if kind == "LSTMCell" else "_l0"
    weights = [getattr(reference, f"weight_{part}{suffix}") for part in ("ih", "hh")]
    joined = torch.cat(weights, 1).detach()
    for weight, value in zip(weights, rounded(joined, joined.abs().max(), 4).split([5, 3], 1), strict=True):
        weight.data.copy_(value)
    if kind == "GRU":  # the state that is kept is not quantized: h' = (1 - z) n + z h
        got = layer(x[None], h[None])[1][0]
        gates = [both[:, :5] @ weights[0].T + reference.bias_ih_l0, both[:, 5:] @ weights[1].T + reference.bias_hh_l0]
        (r_x, z_x, n_x), (r_h, z_h, n_h) = (gate.chunk(3, 1) for gate in gates)
        z = torch.sigmoid(z_x + z_h)
        expected = (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h
    elif kind == "LSTM":
        got = layer(x[None], (h[None], c[None]))[1][1][0]
        expected = reference(both[None, :, :5], (both[None, :, 5:], c[None]))[1][1][0]
    else:
        got, expected = layer(x, (h, c))[1], reference(both[:, :5], (both[:, 5:], c))[1]
    assert torch.allclose(got, expected, atol=1e-6)


def test_checkpoints_have_the_old_keys():
    layer, plain = quant_nn.QuantConv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    recurrent = quant_nn.QuantLSTM(3, 4, num_layers=2)
    nn.LSTM(3, 4, num_layers=2).load_state_dict(recurrent.state_dict())
    calibrate(layer, torch.randn(2, 3, 8, 8))
    old = {key: value.clone() for key, value in layer.state_dict().items()}  # without the metadata of a state dict
    shapes = {key: tuple(value.shape) for key, value in old.items() if "quantizer" in key}
    assert shapes == {"_input_quantizer._amax": (), "_weight_quantizer._amax": (4, 1, 1, 1)}
    fresh = quant_nn.QuantConv2d(3, 4, 3)
    fresh.load_state_dict(old)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(fresh(x), layer(x))
    learned = TensorQuantizer(QuantDescriptor(amax=2.0, learn_amax=True))
    assert list(learned.state_dict()) == ["_amax", "clip.clip_value_min", "clip.clip_value_max"]
    learned.load_state_dict({"_amax": torch.tensor(2.0), "clip.clip_value_min": torch.tensor(-3.0)}, strict=False)
    assert learned.clip.clip_value_min == -3


def test_amax_of_any_shape_is_kept():
    quantizer = TensorQuantizer(QuantDescriptor(amax=[3.0, 2.0]))
    assert quantizer.amax.tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match=r"amax of shape \(2,\) does not fit .* tensor of shape \(5,\)"):
        quantizer(torch.rand(5))
    quantizer = TensorQuantizer()
    x = torch.randn(3, 4)
    assert quantizer._get_amax(x) == x.abs().max()
    quantizer.amax = 0.5
    assert (quantizer._get_amax(x), quantizer.step_size) == (0.5, torch.tensor(0.5) / 127)


def test_errors_are_of_the_old_types():
    quantizer = TensorQuantizer()
    quantizer._calibrator = None
    with pytest.raises(ValueError, match="Calibrator was not created"):
        quantizer.enable_calib()
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()
    with pytest.raises(ValueError, match="learn_amax is False"):
        quantizer.enable_clip()
    with pytest.raises(RuntimeError, match="learn_amax=False"):
        quantizer.init_learn_amax()
    calibrator = calib.MaxCalibrator(8, 0, False)
    calibrator.collect(torch.rand(3, 2))
    with pytest.raises(RuntimeError, match="shape changed"):
        calibrator.collect(torch.rand(4, 2))
    with pytest.raises(ValueError, match="Negative values in amax"):
        tensor_quant.fake_tensor_quant(torch.rand(3), torch.tensor(-1.0))
    with pytest.raises(TypeError, match="Negative values encountered"):
        tensor_quant.tensor_quant(torch.tensor([-1.0]), torch.tensor(1.0), 8, True)
    with pytest.raises(ValueError, match="scale is too large for FP16"):
        tensor_quant.tensor_quant(torch.rand(3).half(), torch.tensor(1e-4).half())
    with pytest.raises(ValueError, match="must be scalar"):
        quant_nn.Clip(torch.ones(2), 1.0, learn_min=True)
    with pytest.raises(TypeError, match="has no argument 'bits'"):
        quant_nn.QuantLinear(3, 4, bits=8)


def test_the_replacement_helper_replaces_and_restores():
    helper = quant_modules.QuantModuleReplacementHelper()
    originals = (nn.Linear, nn.Conv2d, nn.MaxPool2d)
    helper.prepare_state(["Linear"])
    helper.apply_quant_modules()
    try:
        assert (nn.Linear, nn.Conv2d) == (originals[0], quant_nn.QuantConv2d)
    finally:
        helper.restore_float_modules()
    assert (nn.Linear, nn.Conv2d, nn.MaxPool2d) == originals
    helper.prepare_state(["Linear"], [(nn, "Linear", quant_nn.QuantLinear)])
    assert {entry.mod_name for entry in helper.quant_map} == {entry.mod_name for entry in helper.default_quant_map}
    assert len(helper.default_quant_map) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_cuda_extension_on_any_device(dtype):
    x = torch.randn(3, 4, 5).to(dtype)
    amax = torch.tensor([0.8, 0.9, 0.7, 1e-26])
    by_axis = cuda_ext.fake_tensor_quant_with_axis(x, amax, 1, 7)
    assert torch.equal(by_axis, tensor_quant.fake_tensor_quant(x, amax.reshape(1, 4, 1), 7))
    assert not by_axis[:, 3].any()
    expected = tensor_quant.fake_tensor_quant(x.abs(), x.abs().max(), 5, True)
    assert torch.equal(cuda_ext.fake_tensor_quant(x.abs(), x.abs().max(), 5, True), expected)
    inplace = x.clone()
    cuda_ext.fake_tensor_quant_(inplace, x.abs().max())
    assert torch.equal(inplace, tensor_quant.fake_tensor_quant(x, x.abs().max()))
    numbers = torch.tensor([0.0, 1.06, 1.07, 300.0, 1000.0, -17.0]).to(dtype)  # steps of 1/8 from 1, of 32 from 256
    assert cuda_ext.fake_e4m3fy(numbers).tolist() == [0.0, 1.0, 1.125, 288.0, 448.0, -16.0]
    assert pq.__version__.split(".")[0] == "2"


class Reads(nn.Module):
    """Asks its layers for what they are made of."""

    def __init__(self, **options):
        super().__init__()
        self.conv = quant_nn.QuantConv2d(3, 4, 3, **options)
        self.pool = quant_nn.QuantMaxPool2d(2)
        self.fc = quant_nn.QuantLinear(36, 5, **options)

    def forward(self, x):
        y = self.pool(self.conv(x.to(self.conv.weight.dtype)))
        y = y.reshape(-1, self.fc.weight.shape[1]) * self.conv.out_channels
        return self.fc(y)


def test_the_older_switch_for_exporting(tmp_path):
    original, path = torch.onnx.export, str(tmp_path / "m.onnx")
    x = torch.randn(2, 3, 8, 8)
    model = calibrate(Reads().eval(), x)
    expected = model(x)
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        assert quant_nn.TensorQuantizer.use_fb_fake_quant
        assert torch.equal(model(x), expected)
        with pq.enable_onnx_export():  # both ways at once
            pass
        torch.onnx.export(model, x, path, verbose=False, opset_version=13)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False
    assert torch.onnx.export is original
    assert sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node) >= 2


@pytest.mark.parametrize(
    ("bits", "dtype", "opset"),
    [(8, torch.float32, 18), (8, torch.float16, 18), (8, torch.bfloat16, 18), ((4, 3), torch.float32, 21)],
)
def test_files_load_in_the_default_session(bits, dtype, opset, tmp_path):
    torch.manual_seed(0)
    weight_bits = 7 if bits == 8 else bits  # x86 CPUs without VNNI saturate with 8 bits
    options = {"quant_desc_input": QuantDescriptor(bits), "quant_desc_weight": QuantDescriptor(weight_bits)}
    model, x = Reads(**options).eval().to(dtype), torch.randn(2, 3, 8, 8).to(dtype)
    calibrate(model, x)
    buffer = io.BytesIO()
    target = buffer if bits == 8 else str(tmp_path / "model.onnx")
    with pq.enable_onnx_export():
        torch.onnx.export(model, x, target, opset_version=13, input_names=["images"], do_constant_folding=True)
    content = buffer.getvalue() if bits == 8 else (tmp_path / "model.onnx").read_bytes()
    proto = onnx.load_model_from_string(content)
    onnx.checker.check_model(proto, full_check=True)
    assert [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")] == [opset]
    session = onnxruntime.InferenceSession(content)
    given = x.float() if dtype == torch.bfloat16 else x  # onnxruntime has no bfloat16 on CPUs: float32 is written
    got = session.run(None, {"images": given.numpy()})[0]
    assert model(x).dtype == dtype
    expected = model(x).detach().float().numpy()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03 * float(np.abs(expected).max())
    assert np.abs(got.astype(np.float32) - expected).max() <= tolerance


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: quant_nn.QuantLinear(3, 4), (5, 3)),
        (lambda: quant_nn.QuantConv2d(3, 4, 3), (2, 3, 6, 6)),
        (lambda: quant_nn.QuantConv3d(2, 3, 2), (1, 2, 4, 4, 4)),
        (lambda: quant_nn.QuantConvTranspose1d(3, 4, 3), (2, 3, 7)),
    ],
)
def test_a_model_that_is_one_layer_exports(layer, shape):
    x = torch.randn(shape)
    made = calibrate(layer().eval(), x)
    file = io.BytesIO()
    with pq.enable_onnx_export():
        torch.onnx.export(made, (x,), file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = made(x).detach().numpy()
    assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
    kinds = [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]
    assert kinds.count("DequantizeLinear") == 2


def test_quantizers_without_a_range_are_named_before_a_file_is_written():
    model = nn.Sequential(quant_nn.QuantLinear(3, 4), quant_nn.QuantLinear(4, 4))
    with (
        pq.enable_onnx_export(),
        pytest.raises(RuntimeError, match=r"0._input_quantizer, 0._weight_.*, … have no range"),
    ):
        torch.onnx.export(model, (torch.randn(2, 3),), io.BytesIO())
