"""What users ask of a file: names of inputs, outputs, sizes and model, the opset, and tensors in a second file."""

import errno
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ConfigError, ExportError, VerifyError
from bitwright.exporting.onnx import external


class Pair(nn.Module):
    """Takes two arguments, one of them in a dict, and returns a tensor twice, an input, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, ...]:
        y = torch.relu(self.conv(x)) + more["bias"]
        return y, self.fc(y.mean((2, 3))), y, more["bias"]


def inputs(batch: int = 2, size: int = 8) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.randn(batch, 3, size, size), {"bias": torch.randn(batch, 16, size, size)}


def small() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 300)
    return nn.Sequential(*parts).eval()


@cache
def prepared(backend: str = "onnxruntime", batch: int = 2) -> tuple[Any, list[Any]]:
    x = torch.randn(batch, 3, 8, 8)
    return bw.calibrate(bw.prepare(small(), x, backend), [x]), [x]


def sizes(path: Path) -> dict[str, list[Any]]:
    graph = onnx.load(path, load_external_data=False).graph
    ends = [*graph.input, *graph.output]
    return {e.name: [d.dim_param or d.dim_value for d in e.type.tensor_type.shape.dim] for e in ends}


def test_names_of_inputs_outputs_sizes_and_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [inputs()]
    model = bw.calibrate(bw.prepare(Pair().eval(), data[0]), data)
    file = bw.export(
        model,
        tmp_path / "net.onnx",
        input_names=["image", "conv"],
        output_names=["map 1", "scores", "again", "same"],
        dynamic_shapes={"x": {0: "n", 2: "height"}, "more": {"bias": {0: "n", -2: "height"}}},
        model_name="my net",
    )
    assert sizes(file.path) == {
        "image": ["n", 3, "height", 8],
        "conv": ["n", 16, "height", 8],
        "map 1": ["n", 16, "height", 8],
        "scores": ["n", 32],
        "again": ["n", 16, "height", 8],
        "same": ["n", 16, "height", 8],
    }
    assert onnx.load(file.path).graph.name == "my net"
    wide = torch.randn(3, 3, 12, 8), {"bias": torch.randn(3, 16, 12, 8)}
    proof = bw.verify(model, file, [*data, wide], runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed
    session = onnxruntime.InferenceSession(file.path)
    x, more = data[0]
    results = session.run(None, {"image": x.numpy(), "conv": more["bias"].numpy()})
    assert [o.name for o in session.get_outputs()] == ["map 1", "scores", "again", "same"]
    assert (results[0] == results[2]).all()
    assert (results[3] == more["bias"].numpy()).all()


BACKENDS = {"onnx": "onnxruntime", "qoperator": "onnxruntime", "tensorrt-ranges": "tensorrt", "qualcomm-2.0.0": "snpe"}


@pytest.mark.parametrize("format", BACKENDS)
def test_every_format_takes_them(format: str, tmp_path: Path) -> None:
    model, data = prepared(BACKENDS[format])
    names = {"input_names": ["image"], "output_names": ["scores"], "dynamic_shapes": {"input": {0: "n"}}}
    file = bw.export(
        model, tmp_path / "net.onnx", format=format, external_data=True, opset_version=19, model_name="me", **names
    )
    assert sizes(file.path) == {"image": ["n", 3, 8, 8], "scores": ["n", 300]}
    written = onnx.load(file.path, load_external_data=False)
    assert written.graph.name == "me"
    assert {o.domain: o.version for o in written.opset_import}[""] == 19
    assert tmp_path / "net.onnx.data" in file.files
    assert all(f.is_file() for f in file.files)
    assert any(i.data_location == onnx.TensorProto.EXTERNAL for i in written.graph.initializer)
    proof = bw.verify(model, file, [*data, torch.randn(3, 3, 8, 8)], latency=False)
    assert proof.ok, proof.missed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name given twice": ({"output_names": ["a", "a"]}, "output_names has 'a' twice"),
    "a name for an input and an output": ({"input_names": ["a"], "output_names": ["a"]}, "'a' is in input_names and"),
    "too few": ({"input_names": []}, r"input_names has 0 names, and the model has 1 input \('input'\)"),
    "too many": ({"output_names": ["a", "b"]}, "output_names has 2 names, and the model has 1 output"),
    "one name": ({"input_names": "image"}, "input_names must be a list of names, not 'image'"),
    "no name": ({"input_names": [""]}, "input_names must be names, and '' is not one"),
    "an old opset": ({"opset_version": 13}, r"opset_version must be from 18 to \d+, not 13"),
    "an opset to come": ({"opset_version": 99}, "opset_version must be from"),
    "no opset": ({"opset_version": "18"}, "opset_version must be a whole number, not '18'"),
    "no name of the model": ({"model_name": ""}, "model_name must be a name, not ''"),
    "external data": ({"external_data": "yes"}, "external_data must be True, False or None, not 'yes'"),
    "another argument": ({"dynamic_shapes": {"inptu": {0: "n"}}}, "names 'inptu', and the model takes input.*'input'"),
    "another axis": ({"dynamic_shapes": {"input": {4: "n"}}}, "names axis 4 of 'input', which has 4 dimensions"),
    "too many shapes": ({"dynamic_shapes": [{0: "n"}, {0: "n"}]}, "not 2 shapes"),
    "a size without a name": ({"dynamic_shapes": {"input": {0: "2 n"}}}, "axis 0 of 'input' '2 n', which is not an id"),
    "no shape": ({"dynamic_shapes": {"input": "n"}}, "has 'n' for 'input': give"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    wishes, message = REFUSED[case]
    model, _ = prepared()
    with pytest.raises(ConfigError, match=message):
        bw.export(model, tmp_path / "net.onnx", **wishes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("activation", "weight", "what"),
    [("uint16 affine", "int8", "uint16 for input"), ("uint8 affine", "int4 group:4", "groups for 0.weight")],
)
def test_an_opset_that_cannot_say_it_is_refused(activation: str, weight: str, what: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8)).eval()
    x = torch.randn(2, 8)
    model = bw.calibrate(bw.prepare(net, x, "virtual", weight=weight, activation=activation), [x])
    with pytest.raises(ExportError, match=f"opset 19 cannot express {what}.*, which needs 21"):
        bw.export(model, tmp_path / "net.onnx", opset_version=19)
    bw.export(model, tmp_path / "net.onnx", opset_version=22)
    assert onnx.load(tmp_path / "net.onnx").opset_import[0].version == 22


def test_a_size_of_one_can_be_free(tmp_path: Path) -> None:
    model, _ = prepared(batch=1)
    file = bw.export(model, tmp_path / "net.onnx", dynamic_shapes=({0: torch.export.Dim("n")},))
    assert sizes(file.path)["input"] == ["n", 3, 8, 8]
    assert bw.verify(model, file, [torch.randn(3, 3, 8, 8)], latency=False).ok


def test_above_2_gb_tensors_are_stored_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (external, bw.exporting.onnx.seal):
        monkeypatch.setattr(module, "LIMIT", 1000)  # in the place of 2 GB
    model, data = prepared()
    with pytest.raises(ExportError, match=r"larger than the 2 GB that .*: leave out external_data=False"):
        bw.export(model, tmp_path / "net.onnx", external_data=False)
    for format in ("onnx", "qoperator"):
        file = bw.export(model, tmp_path / "net.onnx", format=format)
        beside = tmp_path / "net.onnx.data"
        assert file.files == (tmp_path / "net.onnx", beside)
        proof = bw.verify(model, file, data, latency=format == "onnx")  # runtimes get two files as well
        assert proof.ok, proof.missed
        assert proof.size == sum(f.stat().st_size for f in file.files)


def test_the_data_beside_is_part_of_the_file(tmp_path: Path) -> None:
    model, data = prepared()
    file = bw.export(model, tmp_path / "net.onnx", external_data=True)
    beside = tmp_path / "net.onnx.data"
    content = beside.read_bytes()
    with pytest.raises(ConfigError, match=r"net.onnx.* exists already"):
        bw.export(model, file, external_data=True, overwrite=False)
    beside.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(VerifyError, match=r"net.onnx.data is not the file written with it"):
        bw.verify(model, file, data)
    beside.unlink()
    with pytest.raises(VerifyError, match=r"net.onnx.data, which holds its large tensors, is missing"):
        bw.verify(model, file, data)
    file.path.unlink()
    beside.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"net.onnx.data.* exists already"):
        bw.export(model, file, external_data=True, overwrite=False)
    assert beside.read_bytes() == b"mine"


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_two_files_appear_together(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the second is written."""
    write, written = Path.write_bytes, []

    def full(path: Path, content: bytes) -> int:
        if path.parent == tmp_path:
            written.append(path.suffix)
            if path.suffix in (".onnx", ".xml"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    model, _ = prepared()
    monkeypatch.setattr(Path, "write_bytes", full)
    target = tmp_path / ("net.onnx" if format == "onnx" else "net.xml")
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        bw.export(model, target, format=format, external_data=True if format == "onnx" else None)
    assert written[-1] == target.suffix
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_again_in_one_piece_leaves_no_tensors_behind(tmp_path: Path) -> None:
    model, data = prepared()
    file = bw.export(model, tmp_path / "net.onnx", external_data=True)
    assert [f.name for f in file.files] == ["net.onnx", "net.onnx.data"]
    file = bw.export(model, tmp_path / "net.onnx")
    assert [f.name for f in tmp_path.iterdir()] == ["net.onnx"]
    assert bw.verify(model, file, data, latency=False).ok
    (tmp_path / "net.onnx.data").write_bytes(b"not ours")  # nothing refers to it
    bw.export(model, tmp_path / "net.onnx")
    assert (tmp_path / "net.onnx.data").read_bytes() == b"not ours"
