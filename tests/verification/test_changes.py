"""A forged file whose checksums fit is never proven: verify compares it with what export writes for the model."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.export import Dim

import bitwright as bw
from bitwright.errors import VerifyError
from bitwright.exporting import FORMATS, ExportedFile, ExportRecord
from bitwright.exporting.making import Making
from bitwright.exporting.onnx.seal import RECORD, write_sealed
from bitwright.verification import changes
from bitwright.verification.proof import Proof
from tests.exporting.probes import Gated, Recurrent, Residual, built, inputs
from tests.verification.forging import FORGED

FORGERIES = 40
WRITTEN = {
    "onnx": ("onnxruntime", Residual),
    "qoperator": ("onnxruntime", Gated),
    "openvino": ("openvino", Gated),
    "torch": ("openvino", Residual),
    "qualcomm-2.0.0": ("snpe", Residual),
    "vitis": ("vitis", Recurrent),
}
Exported = tuple[nn.Module, ExportedFile]


def calibrated(net: nn.Module, backend: str = "onnxruntime", **wishes: Any) -> nn.Module:
    model = bw.prepare(net, inputs(net), backend, **wishes)
    return bw.calibrate(model, [inputs(net)], progress=False)


@pytest.fixture(scope="module", params=WRITTEN)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    backend, kind = WRITTEN[request.param]
    model, suffix = calibrated(built(kind), backend), FORMATS.get(request.param).suffix
    return model, bw.export(model, tmp_path_factory.mktemp("good") / f"net{suffix}", format=request.param)


def changed(model: nn.Module, file: ExportedFile, path: Path | ExportedFile) -> list[str] | None:
    read = FORMATS.get(file.record.format)().read(Path(path))
    assert read.record is not None
    proof = Proof(str(path), 1, 1)
    changes.add_changes(proof, model, read, read.record, path)
    return proof.changes


def test_forgeries_are_found(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = exported
    read = FORMATS.get(file.record.format)().read(file.path)
    assert changed(model, file, file.path) == []
    again = changes.export_again(model, read, file.record, tmp_path)
    monkeypatch.setattr(changes, "export_again", lambda *_: again)
    (tmp_path / "forged").mkdir()
    chosen, seen = random.Random(file.record.format), 0
    while seen < FORGERIES:
        for path in file.files:
            shutil.copy(path, tmp_path / "forged" / path.name)
        forged = tmp_path / "forged" / file.path.name
        done = FORGED[forged.suffix](forged, chosen)
        seen += bool(done)
        try:
            found = changed(model, file, forged) if done else ["nothing to change"]
        except VerifyError:
            continue  # it cannot even be read
        harmless = found == [] and 'offset="' in done  # of an empty constant
        assert found or harmless, done


def test_forged_file_is_not_proven(tmp_path: Path) -> None:
    """A limit that no value exceeds, a bias one step off: no run shows them."""
    net = built(Residual)
    model = calibrated(net)
    file = bw.export(model, tmp_path / "net.onnx")

    def verified(path: Path | ExportedFile, **limits: None) -> Proof:
        return bw.verify(model, path, [inputs(net)], runtimes=["onnxruntime"], latency=False, limits=limits)

    assert verified(file).changes == []
    assert verified(file.path).changes == []
    proto = onnx.load(file.path)
    bias = next(i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.INT32)
    bias.raw_data = bytes([bias.raw_data[0] ^ 1]) + bias.raw_data[1:]
    write_sealed(proto, file.path)
    for path in (file, file.path):
        proof = verified(path)
        assert (proof.ok, proof.changes) == (False, [f"the stored tensor {bias.name} differs"])
        missed = f"the file is not what export writes for this model: the stored tensor {bias.name} differs"
        assert missed in proof.missed
    assert verified(file, changes=None, largest=None, output_local=None, output_steps=None).changes is None


def test_record_that_was_edited_is_found(tmp_path: Path) -> None:
    net = built(Residual)
    model = calibrated(net)
    file = bw.export(model, tmp_path / "net.onnx")
    entries = tuple(replace(t, spec="uint8 affine tensor") for t in file.record.tensors)
    rewritten(file.path, replace(file.record, tensors=entries))
    assert changed(model, file, file.path) == ["its record differs"]


def rewritten(path: Path, record: ExportRecord) -> None:
    proto = onnx.load(path)
    next(e for e in proto.metadata_props if e.key == RECORD).value = record.to_json()
    write_sealed(proto, path)


def test_file_of_an_older_version_is_not_compared(tmp_path: Path) -> None:
    net = built(Residual)
    model = calibrated(net)
    file = bw.export(model, tmp_path / "net.onnx")
    assert file.record.making is not None
    rewritten(file.path, replace(file.record, making=None))
    proof = bw.verify(model, file.path, [inputs(net)], runtimes=["onnxruntime"], latency=False)
    why = "not compared with what export writes for this model: it was written by a version of Bitwright that did not"
    assert (proof.ok, proof.changes) == (False, None)
    assert any(line.startswith(why) for line in proof.missed)
    lenient = {"changes": None}
    assert bw.verify(model, file.path, [inputs(net)], runtimes=["onnxruntime"], latency=False, limits=lenient).ok


def test_other_versions_only_tell_that_files_are_equal(tmp_path: Path) -> None:
    net = built(Residual)
    model = calibrated(net)
    file = bw.export(model, tmp_path / "net.onnx")
    making = Making.noted_in(file.record)
    old = replace(making, versions={**making.versions, "torch": "2.0"})
    rewritten(file.path, replace(file.record, making=vars(old)))
    assert changed(model, file, file.path) == []
    proto = onnx.load(file.path)
    proto.graph.node[0].name += "_"
    write_sealed(proto, file.path)
    assert changed(model, file, file.path) is None


OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"dynamic_shapes": False},
    "names": {"dynamic_shapes": {"x": {0: "batch", 2: "height"}}, "input_names": ["image"], "output_names": ["scores"]},
    "endless dim": {"dynamic_shapes": ({0: Dim("n")},)},
    "dims": {"dynamic_shapes": ({0: Dim("n", min=1, max=64), 2: Dim.STATIC, 3: Dim.AUTO},)},
    "opset": {"opset_version": 21, "model_name": "net", "external_data": True},
    "other example": {"example_inputs": torch.randn(3, 3, 16, 8), "dynamic_shapes": False},
    "float": {"quantized": False},
    "half": {"store_half": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_record_knows_how_to_write_the_file_again(case: str, tmp_path: Path) -> None:
    model = calibrated(built(Residual))
    file = bw.export(model, tmp_path / "net.onnx", **OPTIONS[case])
    assert changed(model, file, file.path) == []


def test_packed_weights_are_written_again(tmp_path: Path) -> None:
    model = calibrated(built(Residual), "virtual", weight="int4 narrow channel:0")
    file = bw.export(model, tmp_path / "net.onnx", pack_weights=True)
    assert changed(model, file, file.path) == []


def test_sizes_that_json_cannot_hold_are_not_compared(tmp_path: Path) -> None:
    model = calibrated(built(Residual))
    file = bw.export(model, tmp_path / "net.onnx", dynamic_shapes={"x": {2: 2 * Dim("half", min=1, max=64)}})
    assert changed(model, file, file.path) is None
    assert changed(model, file, file) == []


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_model_of_another_precision_is_written_again(kind: torch.dtype, tmp_path: Path) -> None:
    net = built(Gated).to(kind)
    x = inputs(net)[0].to(kind)
    model = bw.calibrate(bw.prepare(net, x, "onnxruntime"), [x], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    shutil.copy(file.path, tmp_path / "copy.onnx")  # which is not known to be what was written
    proof = bw.verify(model, tmp_path / "copy.onnx", [x], runtimes=["onnxruntime"], latency=False)
    assert proof.changes == []


def test_loaded_model_writes_the_same_file(tmp_path: Path) -> None:
    net = built(Residual)
    model = calibrated(net)
    file = bw.export(model, tmp_path / "net.onnx")
    bw.save(model, tmp_path / "saved")
    assert changed(bw.load(tmp_path / "saved", built(Residual)), file, file.path) == []


def test_what_this_process_wrote_is_only_written_again_if_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = built(Residual)
    model = calibrated(net)
    path = tmp_path / "net.onnx"
    bw.export(model, path)
    calls, again = [], changes.export_again
    monkeypatch.setattr(changes, "export_again", lambda *given: calls.append(given) or again(*given))
    settings: dict[str, Any] = {"runtimes": ["onnxruntime"], "latency": False}
    assert bw.verify(model, str(path), [inputs(net)], **settings).changes == []
    assert not calls
    shutil.copy(path, tmp_path / "copy.onnx")
    assert bw.verify(model, tmp_path / "copy.onnx", [inputs(net)], **settings).changes == []
    assert len(calls) == 1
    proto = onnx.load(path)
    proto.graph.doc_string = "other"
    write_sealed(proto, path)
    assert bw.verify(model, path, [inputs(net)], **settings).changes
    assert len(calls) == 2
