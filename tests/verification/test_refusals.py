"""Files that are not what they should be: each is refused in words, before a runtime opens it."""

import dataclasses
import random
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import VerifyError
from tests.verification.nets import Residual, tampered


def test_file_of_another_model(cases) -> None:
    model, _, x = cases["onnxruntime", "residual"]
    _, other, _ = cases["onnxruntime", "attention"]
    with pytest.raises(
        VerifyError, match=r"was exported from another model: from Attention, and this Residual"
    ) as said:
        bw.verify(model, other, [x])
    assert "the file has the fingerprint " in str(said.value)


def test_file_of_a_model_with_other_weights(cases, tmp_path: Path) -> None:
    """Same class, same shapes: 36 % equal and a gap of 255 steps passed once."""
    _, file, x = cases["onnxruntime", "residual"]
    torch.manual_seed(7)
    other = bw.calibrate(bw.prepare(Residual().eval(), x), [x])
    with pytest.raises(VerifyError, match=r"has changed since it was exported .* its weights and scales differ"):
        bw.verify(other, file, [x])


@pytest.mark.parametrize("change", ["calibrated anew", "a weight", "a bias", "a quantizer disabled"])
def test_model_that_changed_since(tmp_path: Path, change: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Residual().eval(), x), [x])
    file = bw.export(model, tmp_path / "stale.onnx")
    assert bw.verify(model, file, [x], latency=False).ok is True
    if change == "calibrated anew":
        bw.calibrate(model, [3 * x])
    elif change == "a quantizer disabled":
        model.get_submodule("stem").weight_quantizer.disable()
    else:
        with torch.no_grad():
            getattr(model.get_submodule("stem"), change.removeprefix("a "))[0] += 1.0
    with pytest.raises(VerifyError, match=r"has changed since it was exported .* export again|from another model"):
        bw.verify(model, file, [x])


def test_the_same_model_in_another_copy_is_the_same(cases) -> None:
    import copy

    model, file, x = cases["onnxruntime", "residual"]
    assert bw.verify(copy.deepcopy(model), file, [x], latency=False).ok is True


def test_file_that_bitwright_did_not_write(cases, tmp_path: Path) -> None:
    model, _, x = cases["onnxruntime", "residual"]
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [value])
    graph.output[0].name = "y"
    opsets = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets), str(tmp_path / "foreign.onnx"))
    with pytest.raises(VerifyError, match=r"was not written by Bitwright: it has no record"):
        bw.verify(model, tmp_path / "foreign.onnx", [x])
    assert bw.run_file(tmp_path / "foreign.onnx")(torch.tensor([-1.0])).item() == 0.0


def test_no_file_and_junk(cases, tmp_path: Path) -> None:
    model, _, x = cases["onnxruntime", "residual"]
    with pytest.raises(VerifyError, match="there is no file"):
        bw.verify(model, tmp_path / "none.onnx", [x])
    for name, content in {"junk": b"junk", "empty": b"", "text": "Grüße, ∂".encode("utf-16")}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(VerifyError, match=r"is not an ONNX file|was not written by Bitwright"):
            bw.verify(model, tmp_path / name, [x])


def test_float_file_is_never_verified(tmp_path: Path) -> None:
    """It is compared as what it is: with the float model."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = bw.calibrate(bw.prepare(Residual().eval(), x), [x])
    file = bw.export(model, tmp_path / "float.onnx", quantized=False)
    proof = bw.verify(model, file, [x], limits={"equal": 0.99, "largest": 1}, latency=False)
    assert proof.ok is False
    assert any("no quantized value was compared" in line for line in proof.missed)
    assert any("placed quantizers were not compared" in line for line in proof.missed)
    compared = bw.verify(model, file, [x], limits=None, latency=False, runtimes=["onnxruntime"])
    found = compared.runtimes["onnxruntime"]
    assert (compared.ok, found.equal, found.largest) == (None, None, None)
    assert found.outputs[0].relative < 1e-5


def test_two_hundred_flipped_bits(cases, several, tmp_path: Path) -> None:
    """Wherever a bit flips, in weights, names, the record or the checksum: the file is refused."""
    chooser = random.Random(0)
    sources = [cases["onnxruntime", name] for name in ("residual", "mixture", "attention")] + [several]
    target = tmp_path / "flipped.onnx"
    for i in range(200):
        model, file, x = sources[i % len(sources)]
        data = bytearray(file.read_bytes())
        near_the_end = i % 5 == 0  # where record and checksum are
        place = chooser.randrange(len(data) - 400 if near_the_end else 0, len(data))
        data[place] ^= 1 << chooser.randrange(8)
        target.write_bytes(data)
        with pytest.raises(VerifyError):
            bw.verify(model, target, [x])
        with pytest.raises(VerifyError):
            bw.run_file(target)


@pytest.mark.parametrize("left", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file(cases, tmp_path: Path, left: float) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    data = file.read_bytes()
    (tmp_path / "short.onnx").write_bytes(data[: int(len(data) * left)])
    with pytest.raises(VerifyError):
        bw.verify(model, tmp_path / "short.onnx", [x])
    if left > 0.05:
        with pytest.raises(VerifyError):
            bw.run_file(tmp_path / "short.onnx")


def test_file_written_by_another_program_after_us(cases, tmp_path: Path) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    loaded = onnx.load(str(file))
    loaded.graph.node[0].name = "renamed"
    onnx.save(loaded, str(tmp_path / "edited.onnx"))
    with pytest.raises(VerifyError, match=r"was changed after Bitwright wrote it"):
        bw.verify(model, tmp_path / "edited.onnx", [x])


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"schema": 99}', '{"schema": 1, "tensors": 3}', "\u2202"])
def test_unreadable_record(cases, tmp_path: Path, record: str) -> None:
    model, file, x = cases["onnxruntime", "residual"]

    def change(loaded: onnx.ModelProto) -> None:
        next(e for e in loaded.metadata_props if e.key == "bitwright.record").value = record

    with pytest.raises(VerifyError, match="record"):
        bw.verify(model, _sealed(file, tmp_path / "record.onnx", change), [x])


def _sealed(source: Path, target: Path, change) -> Path:
    from bitwright.exporting.onnx.seal import write_sealed

    loaded = onnx.load(str(source))
    change(loaded)
    write_sealed(loaded, target)
    return target


def test_record_that_names_other_tensors(cases, tmp_path: Path) -> None:
    """A map that leads nowhere is not a proof: what it does not lead to was not compared."""
    model, file, x = cases["onnxruntime", "residual"]

    def without_tensors(record):
        return dataclasses.replace(record, tensors=tuple(t for t in record.tensors if t.kind == "weight"))

    emptied = tampered(file, tmp_path / "empty.onnx", lambda model: None, without_tensors)
    proof = bw.verify(model, emptied, [x], runtimes=["onnxruntime"], latency=False)
    assert proof.ok is False
    assert any("placed quantizers were not compared" in m for m in proof.missed)

    def swapped(record):
        first, second, *_ = [t for t in record.tensors if t.kind == "activation"]
        exchanged = {first: second.tensor, second: first.tensor}
        tensors = [dataclasses.replace(t, tensor=exchanged.get(t, t.tensor)) for t in record.tensors]
        return dataclasses.replace(record, tensors=tuple(tensors))

    confused = tampered(file, tmp_path / "confused.onnx", lambda model: None, swapped)
    assert bw.verify(model, confused, [x], runtimes=["onnxruntime"], latency=False).ok is False


def test_plain_module_is_refused(cases) -> None:
    _, file, x = cases["onnxruntime", "residual"]
    with pytest.raises(bw.errors.ConfigError, match=r"was not made by bitwright\.prepare"):
        bw.verify(nn.Linear(2, 2), file, [x])
