"""The exported file: valid, standard, integer, named after the user's model, and quiet."""

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, ExportError, MissingExtraError
from bitwright.exporting import ExportedFile
from bitwright.exporting.deploy import deploy
from bitwright.numerics import quantize


class Net(nn.Module):
    """Conv-BN-ReLU6, max-pool, a residual sum, a functional layer with its own parameters, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.act = nn.ReLU6()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.weight = nn.Parameter(torch.randn(6, 8) / 3)
        self.bias = nn.Parameter(torch.randn(6))
        self.fc = nn.Linear(6, 5)
        with torch.no_grad():
            self.bn1.running_mean.normal_()
            self.bn1.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.act(self.bn1(self.conv1(x))), 2)
        x = torch.relu(self.conv2(x) + x) + self.shift
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.fc(torch.relu(F.linear(x, self.weight, self.bias)))


@pytest.fixture(scope="module")
def qmodel() -> nn.Module:
    torch.manual_seed(0)
    model = bw.prepare(Net().eval(), torch.randn(1, 3, 16, 16))
    return bw.calibrate(model, [torch.randn(8, 3, 16, 16) for _ in range(3)])


@pytest.fixture(scope="module")
def file(qmodel: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> ExportedFile:
    return bw.export(qmodel, tmp_path_factory.mktemp("export") / "net.onnx")


@pytest.fixture(scope="module")
def loaded(file: Path) -> onnx.ModelProto:
    return onnx.load(file)


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def test_file_is_standard_onnx(loaded: onnx.ModelProto) -> None:
    onnx.checker.check_model(loaded, full_check=True)
    assert {n.domain for n in loaded.graph.node} <= {"", "ai.onnx"}
    assert not loaded.functions
    assert [entry.key for entry in loaded.metadata_props] == ["bitwright.record", "bitwright.checksum"]
    assert not any(n.metadata_props for n in loaded.graph.node)
    assert loaded.producer_name == "bitwright"


def test_weights_are_stored_as_integers(qmodel: nn.Module, loaded: onnx.ModelProto) -> None:
    stored = initializers(loaded)
    for name in ("conv1", "conv2", "fc"):
        layer = qmodel.get_submodule(name)
        quantizer = layer.weight_quantizer
        weight, _ = layer.folded_weight()
        expected = quantize(weight, quantizer.scale, quantizer.zero_point, -63, 63, 0, dtype=torch.int8)
        np.testing.assert_array_equal(stored[f"{name}.weight.integers"], expected.numpy())
        assert stored[f"{name}.weight.integers"].dtype == np.int8
        assert np.abs(stored[f"{name}.weight.integers"]).max() == 63
    large = [n for n, v in stored.items() if v.dtype == np.float32 and v.ndim > 1]
    assert large == []


def test_bias_is_int32_in_units_of_input_times_weight(qmodel: nn.Module, loaded: onnx.ModelProto) -> None:
    stored = initializers(loaded)
    layer = qmodel.get_submodule("conv1")
    scale = layer.input_quantizer.scale.double() * layer.weight_quantizer.scale.double()
    bias = layer.folded_weight()[1].detach().double()
    assert stored["conv1.bias.integers"].dtype == np.int32
    gap = np.abs(stored["conv1.bias.integers"] - (bias / scale).numpy())
    assert gap.max() <= 0.5 + 1e-6


def test_scales_of_whole_tensors_have_no_dimension(loaded: onnx.ModelProto) -> None:
    stored = initializers(loaded)
    for node in loaded.graph.node:
        if node.op_type == "QuantizeLinear":
            assert stored[node.input[1]].shape == ()
            assert stored[node.input[2]].shape == ()
            assert stored[node.input[2]].dtype == np.uint8


def test_nodes_bear_the_users_names(loaded: onnx.ModelProto) -> None:
    names = {n.name: n.op_type for n in loaded.graph.node}
    assert names["conv1"] == names["conv2"] == "Conv"
    assert names["fc"] == "Gemm"
    assert names["linear"] == "Gemm"
    assert names["add"] == "Add"
    assert names["x_quantized/quantize"] == "QuantizeLinear"
    assert len(names) == len(loaded.graph.node)


def test_activations_that_saturation_implies_are_dropped(loaded: onnx.ModelProto) -> None:
    kinds = [n.op_type for n in loaded.graph.node]
    assert "Relu" not in kinds
    assert "Clip" not in kinds
    assert "BatchNormalization" not in kinds
    assert kinds.count("GlobalAveragePool") == 1


def test_quantizer_is_repeated_after_max_pool(loaded: onnx.ModelProto) -> None:
    pool = next(n for n in loaded.graph.node if n.op_type == "MaxPool")
    users = [n for n in loaded.graph.node if pool.output[0] in n.input]
    assert [u.op_type for u in users] == ["QuantizeLinear"]
    source = next(n for n in loaded.graph.node if pool.input[0] in n.output)
    assert source.op_type == "DequantizeLinear"
    assert list(source.input[1:]) == list(users[0].input[1:])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_file_takes_any_batch(qmodel: nn.Module, file: Path, batch: int) -> None:
    x = torch.randn(batch, 3, 16, 16)
    with torch.no_grad():
        expected = qmodel(x)
    got = bw.run_file(file)(x)
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=0.05 * float(expected.abs().max()))


def test_deployed_twin_computes_what_the_simulation_does(qmodel: nn.Module) -> None:
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(deploy(qmodel).model(x), qmodel(x), rtol=0, atol=1e-5)


def test_clamp_that_matters_is_kept(tmp_path: Path) -> None:
    """A shared scale reaches below zero, so the ReLU before it must stay."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.relu(self.a(x)), self.b(x)], 1)

    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = bw.calibrate(bw.prepare(Mixed().eval(), x, backend="openvino"), [x])
    loaded = onnx.load(str(bw.export(model, tmp_path / "m.onnx")))
    assert [n.op_type for n in loaded.graph.node].count("Relu") == 1


def test_export_says_nothing(
    qmodel: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "bitwright"):
        bw.export(qmodel, tmp_path / "quiet.onnx")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert [r for r in caplog.records if r.levelno > logging.DEBUG or r.name.startswith("bitwright")] == []
    assert [p.name for p in tmp_path.iterdir()] == ["quiet.onnx"]


def test_float_export_equals_the_original(qmodel: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Net().eval()
    file = bw.export(qmodel, tmp_path / "float.onnx", quantized=False)
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(bw.run_file(file)(x), original(x), rtol=1e-4, atol=1e-5)


def test_model_that_fixes_its_batch_is_exported_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.reshape(2, 4))

    x = torch.randn(2, 4)
    model = bw.calibrate(bw.prepare(Fixed().eval(), x), [x])
    with caplog.at_level(logging.WARNING, "bitwright"):
        file = bw.export(model, tmp_path / "fixed.onnx")
    assert "fixed batch size" in caplog.text
    assert onnx.load(file).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_uncalibrated_model_is_refused(tmp_path: Path) -> None:
    model = bw.prepare(Net().eval(), torch.randn(1, 3, 16, 16))
    with pytest.raises(ExportError, match=r"not quantizing yet: .* calibrate the model first"):
        bw.export(model, tmp_path / "no.onnx")
    assert list(tmp_path.iterdir()) == []


def test_bad_places_are_refused(qmodel: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        bw.export(qmodel, tmp_path)
    existing = tmp_path / "there.onnx"
    existing.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        bw.export(qmodel, existing, overwrite=False)
    with pytest.raises(ConfigError, match="is not a folder"):
        bw.export(qmodel, existing / "below.onnx")
    assert existing.read_text() == "mine"


def test_missing_extra_is_named(qmodel: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bitwright\[onnx\]'"):
        bw.export(qmodel, tmp_path / "no.onnx")


def test_plain_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not made by bitwright\.prepare"):
        bw.export(nn.Linear(2, 2), tmp_path / "no.onnx")


def test_data_dependent_model_is_refused_in_one_line(tmp_path: Path) -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum() > 0 else x

    x = torch.ones(2, 4)
    model = bw.calibrate(bw.prepare(Island().eval(), x), [x])
    with pytest.raises(ExportError, match="the exporter refused the model") as caught:
        bw.export(model, tmp_path / "no.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
