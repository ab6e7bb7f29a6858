"""Scripts in the style of MQBench's README and examples: prepare, calibrate, train, deploy, load in onnxruntime."""

import copy
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.compat.mqbench.advanced_ptq import ptq_reconstruction
from bitwright.compat.mqbench.convert_deploy import convert_deploy, convert_merge_bn, convert_onnx
from bitwright.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform
from bitwright.compat.mqbench.prepare_qat_fx_by_platform import prepare_qat_fx_by_platform
from bitwright.compat.mqbench.utils.profiling import profiling
from bitwright.compat.mqbench.utils.state import (
    disable_all,
    enable_calibration,
    enable_calibration_woquantization,
    enable_quantization,
)
from bitwright.errors import CalibrationError, ConfigError, ExportError
from tests.compat.mqbench.nets import ACADEMIC


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x):
        y = self.pool(self.relu(self.bn(self.conv(x))))
        return self.fc(F.adaptive_avg_pool2d(y, 4).flatten(1))


def data(batches=3):
    return [(torch.randn(8, 3, 8, 8), torch.randint(4, (8,))) for _ in range(batches)]


def run(path, x):
    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def close(got, expected):
    """Equal, except that a few values may be one integer off."""
    difference = np.abs(got - expected.detach().numpy())
    return difference.max() <= 0.05 * float(expected.abs().max()) and np.median(difference) <= 1e-5


SCHEME = {"w_qscheme": {"bit": 7, "per_channel": True}, "a_qscheme": {"bit": 8, "symmetry": False}}


def test_quantization_aware_training(tmp_path):
    loader, model = data(), Small().train()
    model = prepare_qat_fx_by_platform(model, BackendType.Tensorrt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.eval()
    enable_calibration(model)
    for images, _ in loader:
        model(images)
    model.train()
    enable_quantization(model)
    scale = next(p for n, p in model.named_parameters() if n.endswith("method.scale")).clone()
    losses = []
    for images, labels in loader * 4:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert not torch.equal(scale, next(p for n, p in model.named_parameters() if n.endswith("method.scale")))
    model.eval()
    before = copy.deepcopy(model.state_dict())
    path = convert_deploy(model, BackendType.Tensorrt, {"data": [8, 3, 8, 8]}, output_path=tmp_path, model_name="net")
    assert path == tmp_path / "net.onnx"
    assert onnxruntime.InferenceSession(str(path)).get_inputs()[0].name == "data"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


TARGETS = ["Tensorrt", "PPLW8A16", "Vitis", "ONNX_QNN", "OPENVINO", "NNIE", "Academic_NLP"]


@pytest.mark.parametrize("backend", [BackendType[name] for name in TARGETS])
def test_every_target_writes_a_file_that_loads(backend, tmp_path):
    loader, model = data(2), Small().eval()
    extra = ACADEMIC if "Academic" in backend.name else {}
    model = prepare_by_platform(model, backend, extra, is_qat=False)
    enable_calibration(model)
    for images, _ in loader:
        model(images)
    enable_quantization(model)
    options = {"output_names": ["scores"], "dynamic_axes": {"data": [0]}}
    x = loader[0][0][:3]
    path = convert_deploy(model, backend, dummy_input=x, output_path=tmp_path / "made", input_names=["data"], **options)
    session = onnxruntime.InferenceSession(str(path))
    assert [v.name for v in (*session.get_inputs(), *session.get_outputs())] == ["data", "scores"]
    assert run(path, loader[1][0]).shape == (8, 4)


def test_what_is_deployed_is_what_was_simulated(tmp_path):
    loader = data(2)
    model = prepare_by_platform(Small().eval(), BackendType.Academic, {"extra_qconfig_dict": SCHEME})
    enable_calibration(model)
    model(loader[0][0])
    enable_quantization(model)
    path = convert_onnx(model, output_path=tmp_path)
    assert path.name == "mqbench_qmodel.onnx"
    assert close(run(path, model.bitwright_ledger.example.args[0]), model(model.bitwright_ledger.example.args[0]))
    x, expected = loader[1][0], model(loader[1][0])
    convert_merge_bn(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("method", ["DoReFaFakeQuantize", "DSQFakeQuantize", "PACTFakeQuantize", "TqtFakeQuantize"])
def test_methods_with_an_even_grid_export_as_integers(method, tmp_path):
    weights = method if method != "PACTFakeQuantize" else "LearnableFakeQuantize"
    activations = method if method != "DoReFaFakeQuantize" else "LearnableFakeQuantize"
    powers = {"pot_scale": True, "symmetry": True} if method.startswith("Tqt") else {}
    scheme = {key: {**value, **powers} for key, value in SCHEME.items()}
    qconfig = {"w_fakequantize": weights, "a_fakequantize": activations, **scheme}
    model = prepare_by_platform(Small().eval(), BackendType.Academic, {"extra_qconfig_dict": qconfig})
    x = data(1)[0][0]
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    path = convert_deploy(model, BackendType.Academic, dummy_input=x, output_path=tmp_path)
    assert close(run(path, x), model(x))


@pytest.mark.parametrize("method", ["NNIEFakeQuantize", "APoTFakeQuantize"])
def test_methods_with_another_grid_export_as_tables(method, tmp_path):
    schemes = {
        "w_qscheme": {"bit": 4, "symmetry": True, "per_channel": True},
        "a_qscheme": {"bit": 5, "symmetry": True},
    }
    qconfig = {"w_fakequantize": method, "a_fakequantize": method, **schemes}
    model = prepare_by_platform(Small().eval(), BackendType.Academic, {"extra_qconfig_dict": qconfig})
    x = data(1)[0][0]
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    model.train()
    F.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
    assert model.get_submodule("conv").weight.grad.abs().max() > 0
    model.eval()
    path = convert_deploy(model, BackendType.Academic, dummy_input=x, output_path=tmp_path)
    assert np.abs(run(path, x) - model(x).detach().numpy()).max() <= 1e-5


def test_profiling_names_the_worst_layer_first():
    x = data(1)[0][0]
    model = prepare_by_platform(Small().eval(), BackendType.Academic, ACADEMIC)
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    outputs = model(x)
    for kind in ("standalone", "interaction"):
        cosines = profiling(model, [x, x], kind)
        assert list(cosines.values()) == sorted(cosines.values())
        assert {"conv", "fc"} <= set(cosines)
        assert 0.9 < min(cosines.values()) <= max(cosines.values()) <= 1 + 1e-9
    assert torch.equal(model(x), outputs)
    with pytest.raises(ConfigError, match="unknown profiling_type 'standalon': did you mean 'standalone'"):
        profiling(model, [x], "standalon")
    with pytest.raises(ConfigError, match="cali_data is empty"):
        profiling(model, [])


def test_refusals(tmp_path):
    model = prepare_by_platform(Small().eval(), BackendType.Tensorrt)
    with pytest.raises((CalibrationError, ExportError), match="not quantizing yet"):
        convert_deploy(model, BackendType.Tensorrt, output_path=tmp_path)
    with pytest.raises(ConfigError, match=r"the model was prepared for tensorrt, not for BackendType.SNPE"):
        convert_deploy(model, BackendType.SNPE, output_path=tmp_path)
    with pytest.raises(ConfigError, match="does not take opset; it takes input_names"):
        convert_deploy(model, BackendType.Tensorrt, output_path=tmp_path, opset=11)
    with pytest.raises(ConfigError, match="prepare"):
        convert_merge_bn(Small())
    assert list(tmp_path.iterdir()) == []


class Readers(nn.Module):
    """One tensor that two layers read, a pool, and a reshape that mixes channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(64, 5)

    def forward(self, x):
        y = self.conv(x)
        return self.fc(self.pool(self.one(y) + self.two(y)).flatten(1))


@pytest.mark.parametrize("bit", [8, 7])
def test_activations_with_scales_of_channels_export(bit, tmp_path):
    scheme = {"symmetry": False, "per_channel": True, "pot_scale": False}
    qconfig = {"w_qscheme": {"bit": 7, **scheme}, "a_qscheme": {"bit": bit, **scheme}}
    model = prepare_by_platform(Readers().eval(), BackendType.Academic, {"extra_qconfig_dict": qconfig})
    x = data(1)[0][0]
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    path = convert_deploy(model, BackendType.Academic, dummy_input=x, output_path=tmp_path)
    assert close(run(path, x), model(x))


@pytest.mark.parametrize("backend", [BackendType.Tensorrt, BackendType.QDQ])
def test_signed_integers_through_a_pool_into_a_float_layer_load(backend, tmp_path):
    model = Readers().eval()
    left = {"extra_quantizer_dict": {"exclude_module_name": ["fc"]}}
    made = prepare_by_platform(model, backend, left)
    x = data(1)[0][0]
    enable_calibration(made)
    made(x)
    enable_quantization(made)
    path = convert_deploy(made, backend, dummy_input=x, output_path=tmp_path)
    assert run(path, x).shape == (8, 5)


@pytest.mark.parametrize("reconstruction", [{"pattern": "layer"}, {"pattern": "block", "prob": 0.5, "scale_lr": 4e-5}])
def test_advanced_ptq(reconstruction):
    cali_data = [images for images, _ in data(2)]
    model = prepare_by_platform(Small().eval(), BackendType.Academic, ACADEMIC)
    enable_calibration_woquantization(model, quantizer_type="act_fake_quant")
    for batch in cali_data:
        model(batch)
    enable_calibration_woquantization(model, quantizer_type="weight_fake_quant")
    model(cali_data[0])
    config = {**reconstruction, "max_count": 60, "warm_up": 0.2, "weight": 0.01, "b_range": [20, 2], "keep_gpu": True}
    plain = copy.deepcopy(model)
    enable_quantization(plain)
    model = ptq_reconstruction(model, cali_data, SimpleNamespace(**config))
    enable_quantization(model)
    disable_all(plain)
    wanted = plain(cali_data[0])
    enable_quantization(plain)
    errors = [float((made(cali_data[0]) - wanted).square().mean()) for made in (model, plain)]
    assert errors[0] < errors[1]
    with pytest.raises(ConfigError, match="has no key 'max_cont': did you mean 'max_count'"):
        ptq_reconstruction(model, cali_data, {"max_cont": 3})
    with pytest.raises(ConfigError, match="does not take exclude_node"):
        ptq_reconstruction(model, cali_data, {"exclude_node": ["conv"]})
