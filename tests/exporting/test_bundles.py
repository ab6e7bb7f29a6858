"""Bundles: a float model and a file of ranges, whose numbers are read again and proven."""

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, ExportError, VerifyError
from bitwright.exporting import FORMATS
from bitwright.exporting.bundles.base import Contents
from bitwright.exporting.bundles.ranges import Place, Range


class Net(nn.Module):
    """A residual sum, ReLU6, a max-pool that carries a scale, a concatenation with a float reader, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.fc = nn.Linear(35, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu6(self.stem(x)), 2)
        y = torch.relu(self.conv(y) + y)
        y = torch.cat([y.mean((2, 3)), F.layer_norm(x, x.shape[1:]).amax((2, 3)), y.amax((2, 3))], 1)
        return self.fc(y)


def quantized(backend: str, **wishes: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    return bw.calibrate(bw.prepare(Net().eval(), x, backend=backend, **wishes), [x]), x


@pytest.fixture(scope="module")
def snpe() -> tuple[nn.Module, torch.Tensor]:
    return quantized("snpe")


@pytest.fixture(scope="module")
def bundle(snpe: tuple[nn.Module, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bw.export(snpe[0], tmp_path_factory.mktemp("bundle") / "net.onnx").path


def test_model_of_a_bundle_is_float(bundle: Path) -> None:
    model = onnx.load(bundle)
    onnx.checker.check_model(model, full_check=True)
    kinds = [n.op_type for n in model.graph.node]
    assert not {"QuantizeLinear", "DequantizeLinear", "Max", "Min"} & set(kinds)
    assert (kinds.count("Relu"), kinds.count("Clip")) == (1, 1)  # nothing that quantizers imply is left out
    assert {numpy_helper.to_array(i).dtype for i in model.graph.initializer} <= {np.dtype("float32"), np.dtype("int64")}


def test_encodings_say_the_simulation_s_numbers(snpe: tuple[nn.Module, torch.Tensor], bundle: Path) -> None:
    """Offsets as Qualcomm counts them: real = (integer + offset) × scale, with integers from 0."""
    data = json.loads(bundle.with_suffix(".encodings").read_text())
    layer = snpe[0].get_submodule("stem")
    (weight,) = data["param_encodings"]["stem.weight"]
    scale, point = (p.item() for p in layer.weight_quantizer.qparams())
    assert (weight["scale"], weight["offset"], weight["bitwidth"]) == (scale, -point, 8)
    assert weight["min"] == pytest.approx(-point * scale)
    assert weight["max"] == pytest.approx((255 - point) * scale)
    assert weight["is_symmetric"] == "False"
    (bias,) = data["param_encodings"]["stem.bias"]
    inputs = layer.input_quantizer.quantizer.qparams()[0].item()
    assert (bias["bitwidth"], bias["offset"]) == (32, -(2**31))
    assert bias["scale"] == pytest.approx(scale * inputs, rel=1e-6)
    outputs = {o.name for o in onnx.load(bundle).graph.output}
    assert outputs <= set(data["activation_encodings"])  # a quantized result has its range


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_versions_of_encodings_are_proven(snpe: tuple[nn.Module, torch.Tensor], tmp_path: Path, version: str) -> None:
    model, x = snpe
    file = bw.export(model, tmp_path / "net.onnx", format=f"qualcomm-{version}")
    assert [f.name for f in file.files] == ["net.onnx", "net.encodings"]
    assert json.loads((tmp_path / "net.encodings").read_text())["version"] == version
    proof = bw.verify(model, file, [x])
    assert (proof.ok, list(proof.runtimes)) == (True, ["reference"])
    assert proof.runtimes["reference"].largest == 0
    assert not proof.runtimes["reference"].uncompared
    torch.testing.assert_close(bw.run_file(file)(x), model(x), rtol=1e-3, atol=0.05)


def test_calibration_cache_has_hex_of_scales(tmp_path: Path) -> None:
    model, x = quantized("tensorrt")
    file = bw.export(model, tmp_path / "net.onnx", format="tensorrt-ranges")
    header, *lines = (tmp_path / "net.calibration.cache").read_text().splitlines()
    assert header.startswith("TRT-")
    scales = {name: struct.unpack(">f", bytes.fromhex(value))[0] for name, value in (li.split(": ") for li in lines)}
    placed = model.get_submodule("stem").input_quantizer.quantizer.qparams()[0].item()
    assert placed in scales.values()
    ranges = json.loads((tmp_path / "net.ranges.json").read_text())["tensorrt"]["blob_range"]
    assert ranges == {name: pytest.approx(scale * 127) for name, scale in scales.items()}
    proof = bw.verify(model, file, [x], latency=False)
    assert proof.ok
    assert proof.runtimes["reference"].largest <= 1  # TensorRT has -128, too


def test_scales_of_weights_that_tensorrt_would_not_find_are_refused(tmp_path: Path) -> None:
    model, _ = quantized("tensorrt", weight="int4 narrow channel:0")
    with pytest.raises(ExportError, match=r"cannot express .*weight: has 4 bits; TensorRT has symmetric int8"):
        bw.export(model, tmp_path / "net.onnx", format="tensorrt-ranges")
    model, _ = quantized("tensorrt")
    with torch.no_grad():
        model.get_submodule("conv").weight_quantizer.method.scale.mul_(2)
    with pytest.raises(ExportError, match=r"largest magnitude over 127 .* conv.weight has others"):
        bw.export(model, tmp_path / "net.onnx", format="tensorrt-ranges")
    assert list(tmp_path.iterdir()) == []


def copied(bundle: Path, folder: Path) -> Path:
    for file in (bundle, bundle.with_suffix(".encodings")):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / bundle.name


def test_bundles_that_were_changed_are_refused(
    snpe: tuple[nn.Module, torch.Tensor], bundle: Path, tmp_path: Path
) -> None:
    model, x = snpe
    file = copied(bundle, tmp_path)
    side = file.with_suffix(".encodings")
    whole = side.read_text()
    changed = "changed after Bitwright wrote it, or belongs to a model other"
    side.write_text(whole.replace('"scale": 0.0', '"scale": 0.1', 1))
    with pytest.raises(VerifyError, match=changed):
        bw.verify(model, file, [x])
    side.write_text(whole[: len(whole) // 2])
    with pytest.raises(VerifyError, match=changed):
        bw.verify(model, file, [x])
    side.unlink()
    with pytest.raises(VerifyError, match=r"net.encodings' is missing: net.onnx was written with it"):
        bw.verify(model, file, [x])
    side.write_text(whole)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(VerifyError, match=r"cannot be trusted|is not an ONNX file"):
        bw.verify(model, file, [x])


def test_bundle_with_the_ranges_of_another_model_is_refused(
    snpe: tuple[nn.Module, torch.Tensor], bundle: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 3, 8, 8)
    other = bw.calibrate(bw.prepare(Net().eval(), x, backend="snpe"), [x])
    file = bw.export(other, tmp_path / "net.onnx")
    with pytest.raises(VerifyError, match="the model has changed since it was exported"):
        bw.verify(snpe[0], file, [x])
    file.path.with_suffix(".encodings").write_bytes(bundle.with_suffix(".encodings").read_bytes())
    with pytest.raises(VerifyError, match="belongs to a model other"):
        bw.verify(other, file, [x])


def test_file_of_ranges_is_not_taken_for_the_model(snpe: tuple[nn.Module, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the name of the file of ranges"):
        bw.export(snpe[0], tmp_path / "net.encodings")
    (tmp_path / "net.encodings").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        bw.export(snpe[0], tmp_path / "net.onnx", overwrite=False)
    with pytest.raises(VerifyError, match=r"holds the ranges; name the .onnx file"):
        FORMATS.get("qualcomm-0.6.1")().read(tmp_path / "net.encodings")


def mutations(data: dict) -> dict[str, tuple[dict, str]]:
    """Encodings with one mistake each, and the message about it."""

    def changed(**entry: object) -> dict:
        made = json.loads(json.dumps(data))
        made["activation_encodings"]["x"][0] |= entry
        return made

    without = json.loads(json.dumps(data))
    del without["activation_encodings"]["x"]
    stranger = json.loads(json.dumps(data))
    stranger["activation_encodings"]["y"] = stranger["activation_encodings"]["x"]
    return {
        "version": ({**data, "version": "0.5"}, r"version is '0.5', not '0.6.1'"),
        "key": ({**data, "more": 1}, "more is unexpected"),
        "text": (changed(is_symmetric=False), r"x\[0\].is_symmetric is False, not one of 'True', 'False'"),
        "sign": (changed(offset=41), r"x\[0\].offset is 41, more than 0"),
        "scale": (changed(scale=-1.0), r"x\[0\].scale is -1.0, not more than 0"),
        "edited": (changed(scale=0.5), "'x' contradicts itself"),
        "missing": (without, "none for 'x'"),
        "stranger": (stranger, "names 'y', which the model beside it does not quantize"),
    }


NAMES = ["version", "key", "text", "sign", "scale", "edited", "missing", "stranger"]


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_in_encodings_are_named(name: str) -> None:
    """Even if the checksum fits: the text itself is read as strictly as the target's tools do."""
    format = FORMATS.get("qualcomm-0.6.1")()
    places = (Place("x", "activation", "uint8", 8, "x/integers"), Place("w", "weight", "uint8", 8, "w.integers"))
    one = {p.tensor: Range(p, np.float32(0.01).reshape(()), np.asarray(41), 0, 255) for p in places}
    contents = Contents(onnx.ModelProto(), places, one)
    data = json.loads(format.texts(contents)[".encodings"])
    assert data["activation_encodings"]["x"][0]["offset"] == -41
    assert len(format.checked({".encodings": json.dumps(data)}, contents)) == 2
    wrong, message = mutations(data)[name]
    with pytest.raises(VerifyError, match=message):
        format.checked({".encodings": json.dumps(wrong)}, contents)


def written(name: str, *ranges: tuple[Place, float, int]) -> dict[str, str]:
    """What a format writes of some tensors, which it reads again."""
    format = FORMATS.get(name)()
    made = {}
    for place, scale, point in ranges:
        low = -127 if name == "stpu" else place.lowest
        made[place.tensor] = Range(place, np.asarray(scale, np.float32), np.asarray(point), low, place.highest)
    contents = Contents(onnx.ModelProto(), tuple(place for place, _, _ in ranges), made)
    texts = format.texts(contents)
    for found in format.checked(texts, contents):
        wanted = made[found.place.tensor]
        assert (found.scale, found.zero_point, found.qmin) == (wanted.scale, wanted.zero_point, wanted.qmin)
    return texts


def test_files_of_ranges_are_as_their_makers_describe_them() -> None:
    signed, unsigned = (Place("x", "activation", t, 8, "x/integers") for t in ("int8", "uint8"))
    weight = Place("c.weight", "weight", "int8", 8, "c.weight.integers")
    vitis = json.loads(written("vitis", (signed, 2.0**-4, 0), (weight, 2.0**-7, 0))[".quant_info.json"])
    assert vitis == {"param": {"c.weight": [[8, 7]]}, "output": {"x": [[8, 4]]}, "input": {}}
    assert written("tengine", (unsigned, 0.0235, 128))[".scale"] == f"x {float(np.float32(0.0235))!r} 128\n"
    ppl = json.loads(written("ppl", (signed, 0.5, 0))[".ppl.json"])["quant_info"]["x"]
    assert (ppl["bit_width"], ppl["per_channel"], ppl["scale"]) == (8, False, 0.5)
    assert (ppl["tensor_min"], ppl["tensor_max"]) == (-64.0, 63.5)
    assert '"scale": 1.0' in written("ppl", (signed, 1.0, 0))[".ppl.json"]  # ppl.nn keeps 1 as an integer
    stpu = json.loads(written("stpu", (signed, 0.01, 0))[".minmax.json"])
    assert stpu == {"x": {"min": pytest.approx(-1.27), "max": pytest.approx(1.27)}}
    cache = written("tensorrt-ranges", (signed, 2 / 127, 0))[".calibration.cache"]
    assert cache.splitlines()[1] == "x: 3c810204"  # for a largest magnitude of 2


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("tengine", "x 0.1\n", "lines are 'tensor scale zero_point'"),
        ("tengine", "x 0.1 300\n", "a zero point that 8 bits do not hold"),
        ("tengine", "", "none for 'x'"),
        ("vitis", '{"param": {}, "output": {"x": [[8, 4.5]]}, "input": {}}', r"output.x\[0\]\[1\] is 4.5"),
        ("vitis", '{"param": {}, "output": {}}', "lacks 'input'"),
        ("ppl", '{"quant_info": {}, "op_info": {}, "more": {}}', "more is unexpected"),
        ("stpu", '{"x": {"min": -1.0, "max": 2.0}}', "'x' that is not symmetric"),
        ("stpu", '{"x": {"min": -1.0', "is not JSON"),
    ],
)
def test_mistakes_in_files_of_ranges_are_named(format: str, text: str, message: str) -> None:
    reader = FORMATS.get(format)()
    contents = Contents(onnx.ModelProto(), (Place("x", "activation", "uint8", 8, "x/integers"),))
    with pytest.raises(VerifyError, match=message):
        reader.checked({reader.sides[0]: text}, contents)


def test_what_a_format_cannot_say_is_refused(snpe: tuple[nn.Module, torch.Tensor], tmp_path: Path) -> None:
    for format, message in {"vitis": "has a zero point", "stpu": "STPU has -127 to 127"}.items():
        with pytest.raises(ExportError, match=f"the format {format} cannot express .*{message}"):
            bw.export(snpe[0], tmp_path / "net.onnx", format=format)
    assert list(tmp_path.iterdir()) == []
