"""Files that are cut, edited or of another model, in every format: refused in words, also if their checksums fit."""

import hashlib
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import bitwright as bw
from bitwright.errors import BitwrightError, VerifyError
from bitwright.exporting import ExportedFile
from bitwright.exporting.bundles.base import BUNDLE
from bitwright.exporting.onnx.seal import write_sealed
from bitwright.exporting.torch_program.file import _digest as program_digest

BACKENDS = {
    "onnx": "onnxruntime",
    "qoperator": "onnxruntime",
    "tensorrt-ranges": "tensorrt",
    "qualcomm-0.6.1": "snpe",
    "qualcomm-2.0.0": "snpe",
    "ppl": "pplcuda",
    "vitis": "vitis",
    "tengine": "tengine_u8",
    "stpu": "stpu",
    "nnie": "nnie",
}
MUTATIONS = 30
Exported = tuple[nn.Module, torch.Tensor, ExportedFile]


def quantized(backend: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    net, x = (
        nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval(),
        torch.randn(2, 2, 2, 2),
    )
    return bw.calibrate(bw.prepare(net, x, backend), [x], progress=False), x


@pytest.fixture(scope="module", params=BACKENDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model, x = quantized(BACKENDS[request.param])
    return model, x, bw.export(model, tmp_path_factory.mktemp("good") / "net.onnx", format=request.param)


def copied(exported: Exported, folder: Path) -> Path:
    for path in exported[2].files:
        shutil.copy(path, folder / path.name)
    return folder / "net.onnx"


def resealed(path: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    """Change a model and give it a checksum that fits."""
    model = onnx.load(path)
    change(model)
    write_sealed(model, path)


def stored(model: onnx.ModelProto, ending: str) -> onnx.TensorProto:
    return next(i for i in model.graph.initializer if i.name.endswith(ending))


def double(tensor: onnx.TensorProto) -> None:
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(2), tensor.name))


def test_cut_and_foreign_files_are_refused(exported: Exported, tmp_path: Path) -> None:
    model, x, _ = exported
    file = copied(exported, tmp_path)
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(VerifyError, match=r"cannot be trusted|not an ONNX file|not written by Bitwright"):
            bw.verify(model, file, [x], latency=False)
    file.write_bytes(whole)
    other, _ = quantized(bw.ledger_of(model).backend.name, seed=1)
    with pytest.raises(VerifyError, match="the model has changed since it was exported"):
        bw.verify(other, file, [x], latency=False)


def test_weight_one_step_off_is_not_proven(tmp_path: Path) -> None:
    model, x = quantized("onnxruntime")
    file = bw.export(model, tmp_path / "net.onnx").path

    def nudge(proto: onnx.ModelProto) -> None:
        tensor = next(i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.INT8 and len(i.dims) == 4)
        values = numpy_helper.to_array(tensor).copy()
        values.flat[0] += -1 if values.flat[0] > 0 else 1
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    resealed(file, nudge)
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)
    assert (proof.ok, proof.runtimes["onnxruntime"].largest) == (False, 1)
    assert any("has values off by 1, more than 0" in line for line in proof.missed)


def test_edited_models_are_refused_or_not_proven(exported: Exported, tmp_path: Path) -> None:
    """An opset that cannot be, a constant that is missing, a weight that was doubled."""
    model, x, _ = exported
    file = copied(exported, tmp_path)
    whole = file.read_bytes()
    changes: dict[str, Callable[[onnx.ModelProto], object]] = {
        "opset": lambda m: setattr(m.opset_import[0], "version", 999),
        "missing": lambda m: m.graph.initializer.remove(m.graph.initializer[0]),
        "type": lambda m: setattr(m.graph.initializer[0], "data_type", 99),
        "short": lambda m: setattr(stored(m, ""), "raw_data", b"1"),
    }
    for name, change in changes.items():
        file.write_bytes(whole)
        resealed(file, change)
        assert outcome(model, file, x) == "refused", name
    file.write_bytes(whole)
    ending = ".scale" if len(exported[2].files) == 1 else ".weight"
    resealed(file, lambda m: double(stored(m, ending)))
    assert outcome(model, file, x) in ("refused", "not proven")


def outcome(model: nn.Module, file: Path, x: torch.Tensor) -> str:
    """What verify says of a file; any error but our own is raised."""
    try:
        proof = bw.verify(model, file, [x], latency=False, progress=False)
    except BitwrightError:
        return "refused"
    return "proven" if proof.ok else "not proven"


def test_random_changes_raise_only_our_errors(exported: Exported, tmp_path: Path) -> None:
    model, x, good = exported
    randomness = random.Random(str(good.record.format))
    for _ in range(MUTATIONS):
        file = copied(exported, tmp_path)
        victim = tmp_path / randomness.choice(good.files).name
        victim.write_bytes(mutated(victim.read_bytes(), randomness))
        if victim != file and randomness.random() < 0.7:
            resealed(file, lambda m, victim=victim: note_checksum(m, victim))
        assert outcome(model, file, x) != "proven" or victim != file  # a changed model is never proven


def mutated(data: bytes, randomness: random.Random) -> bytes:
    place = randomness.randrange(len(data))
    changes = {
        "cut": lambda: data[:place],
        "flip": lambda: data[:place] + bytes([data[place] ^ (1 << randomness.randrange(8))]) + data[place + 1 :],
        "insert": lambda: data[:place] + randomness.randbytes(randomness.randrange(1, 9)) + data[place:],
        "remove": lambda: data[:place] + data[place + randomness.randrange(1, 30) :],
        "clear": lambda: data[:place] + bytes(8) + data[place + 8 :],
    }
    return changes[randomness.choice(list(changes))]()


def note_checksum(model: onnx.ModelProto, victim: Path) -> None:
    """Put the checksum of the changed file of ranges into the bundle's model."""
    for entry in model.metadata_props:
        if entry.key == BUNDLE:
            note = json.loads(entry.value)
            for suffix in [s for s in note["checksums"] if victim.name.endswith(s)]:
                note["checksums"][suffix] = hashlib.sha256(victim.read_bytes()).hexdigest()
            entry.value = json.dumps(note)


def resealed_ir(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change an IR's graph and give it a checksum that fits."""
    xml, tensors = path.read_bytes(), path.with_suffix(".bin").read_bytes()
    end = xml.rindex(b"\n<!-- bitwright")
    xml = change(xml[:end])
    path.write_bytes(xml + f"\n<!-- bitwright {hashlib.sha256(xml + tensors).hexdigest()} -->\n".encode())


def resealed_program(path: Path, randomness: random.Random) -> None:
    """Change a member of an archive and give it a checksum that fits."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    victim = randomness.choice([name for name in members if not name.endswith(("checksum", "serialization_id"))])
    members[victim] = mutated(members[victim] or bytes(1), randomness)
    seal = next(name for name in members if name.endswith("bitwright.checksum"))
    members[seal] = program_digest(zipfile.ZipFile(io.BytesIO(packed(members)))).encode()
    path.write_bytes(packed(members))


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(("format", "name"), [("openvino", "net.xml"), ("torch", "net.pt2"), ("onnx", "net.onnx")])
def test_random_changes_of_larger_files_raise_only_our_errors(format: str, name: str, tmp_path: Path) -> None:
    """An OpenVINO IR, a program of torch, and ONNX with large tensors in a second file."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(8, 128)).eval(), torch.randn(2, 2, 2, 2)
    model = bw.calibrate(bw.prepare(net, x, "openvino"), [x], progress=False)
    (tmp_path / "good").mkdir()
    good = bw.export(model, tmp_path / "good" / name, format=format, external_data=True if format == "onnx" else None)
    randomness = random.Random(format)
    for attempt in range(12):
        for path in good.files:
            shutil.copy(path, tmp_path / path.name)
        file = tmp_path / name
        if attempt % 2 and format == "openvino":
            resealed_ir(file, lambda xml: mutated(xml, randomness))
        elif attempt % 2 and format == "torch":
            resealed_program(file, randomness)
        else:
            victim = tmp_path / randomness.choice(good.files).name
            victim.write_bytes(mutated(victim.read_bytes(), randomness))
            assert outcome(model, file, x) != "proven"
            continue
        outcome(model, file, x)
