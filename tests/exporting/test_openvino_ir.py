"""OpenVINO IR: written whole, proven in OpenVINO as the ONNX file is, and refused if it is not what was written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ConfigError, VerifyError
from bitwright.exporting.formats.base import format_of
from bitwright.verification.alone import check_file

ov = pytest.importorskip("openvino")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise, self.up = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.fc = nn.Linear(8, 10)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(image)
        x = self.up(torch.relu(self.depthwise(x) + x))
        return self.fc(x.mean((2, 3))), x


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    return bw.calibrate(bw.prepare(Net().eval(), x, "openvino"), [x])


@pytest.fixture
def file(model: nn.Module, tmp_path: Path) -> Path:
    return bw.export(model, tmp_path / "net.xml", format="openvino", input_names=["pixels"]).path


def batches() -> list[Tensor]:
    return [torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]


def test_it_is_proven_as_the_onnx_file_is(model: nn.Module, file: Path, tmp_path: Path) -> None:
    proof = bw.verify(model, file, batches())
    assert proof.ok, proof.missed
    assert list(proof.runtimes) == ["openvino"]
    onnx = bw.export(model, tmp_path / "net.onnx")
    same = bw.verify(model, onnx, batches(), runtimes=["openvino"], latency=False).runtimes["openvino"]
    found = proof.runtimes["openvino"]
    assert found.coverage == same.coverage
    assert found.coverage_multiply_adds == same.coverage_multiply_adds
    assert [(t.name, t.largest, t.equal) for t in found.tensors] == [(t.name, t.largest, t.equal) for t in same.tensors]
    assert [o.name for o in found.operators] == [o.name for o in same.operators]
    assert found.latency is not None
    assert proof.size == sum(f.stat().st_size for f in (file, file.with_suffix(".bin")))
    x = batches()[0]
    results = (bw.run_file(path, "openvino")(x) for path in (file, onnx))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_its_float_twin_is_the_network_in_fp32(file: Path) -> None:
    read = format_of(file).read(file)
    feeds = {"pixels": batches()[0].numpy()}
    compiled = ov.compile_model(read.float_twin().model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = {n.get_type_name() for n in read.float_twin().model.get_ops()}
    assert "FakeQuantize" not in kinds
    plain = compiled(feeds)[0]
    exact = ov.compile_model(read.model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]
    assert 0 < np.abs(plain - exact).max() < 0.1 * np.abs(plain).max()
    assert read.multiply_adds(feeds)["depthwise"] == 2 * 16 * 8 * 8 * 9


def test_anyone_can_open_it(model: nn.Module, file: Path) -> None:
    x = batches()[1]
    results = ov.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"pixels": x.numpy()})
    expected = model(x)[0].detach().numpy()
    assert np.abs(results[0] - expected).max() < 0.05 * np.abs(expected).max()


def test_what_is_not_what_was_written_is_refused(model: nn.Module, file: Path, tmp_path: Path) -> None:
    text, tensors = file.read_text(), file.with_suffix(".bin").read_bytes()
    changed = bytes([tensors[0] ^ 1]) + tensors[1:]
    edited = text.replace('name="pixels"', 'name="others"', 1)
    for xml, data in ((edited, tensors), (text, changed), (text[:-90], tensors)):
        file.write_text(xml)
        file.with_suffix(".bin").write_bytes(data)
        with pytest.raises(VerifyError, match="cannot be trusted: it was changed after Bitwright wrote it"):
            bw.verify(model, file, batches())
    file.with_suffix(".bin").unlink()
    with pytest.raises(VerifyError, match=r"net.bin' is missing: net.xml is incomplete without its tensors"):
        bw.verify(model, file, batches())
    stranger = ov.convert_model(nn.Linear(3, 4), example_input=torch.randn(1, 3))
    ov.save_model(stranger, tmp_path / "theirs.xml")
    with pytest.raises(VerifyError, match="was not written by Bitwright"):
        bw.verify(model, tmp_path / "theirs.xml", batches())
    (tmp_path / "theirs.xml").write_text("<net>")
    with pytest.raises(VerifyError, match="is not an OpenVINO IR"):
        bw.verify(model, tmp_path / "theirs.xml", batches())


def test_what_cannot_be_is_refused(model: nn.Module, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in .xml, and 'net.onnx' does not"):
        bw.export(model, tmp_path / "net.onnx", format="openvino")
    with pytest.raises(ConfigError, match=r"'net.xml' ends like files of the format 'openvino', not of 'onnx', which"):
        bw.export(model, tmp_path / "net.xml", format="onnx")
    assert bw.export(model, tmp_path / "chosen.xml").record.format == "openvino"  # by its name
    with pytest.raises(ConfigError, match="stores tensors in a second file: leave out external_data=False"):
        bw.export(model, tmp_path / "net.xml", format="openvino", external_data=False)
    with pytest.raises(VerifyError, match="onnxruntime executes onnx, qoperator, not openvino"):
        bw.verify(model, file, batches(), runtimes=["onnxruntime"])
    with pytest.raises(ConfigError, match="exists already"):
        bw.export(model, file, format="openvino", overwrite=False)


def test_it_is_not_judged_without_its_model(file: Path) -> None:
    with pytest.raises(VerifyError, match=r"cannot be judged alone, .*: give the model .* or compare it with another"):
        check_file(file, batches())
