"""A runtime that crashes or hangs does so in a process of its own, and the proof says where."""

import os
import threading

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright as bw
from bitwright.errors import VerifyError
from bitwright.exporting.formats.base import format_of
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES
from bitwright.verification.isolation.child import RuntimeDied, child_of
from tests.verification import crashing

DEATHS = {
    "Dying": "crashed with SIGSEGV",
    "Killed": "crashed with SIGKILL, as the system does to a process when memory runs out",
    "Quitting": "ended with the exit code 7 (out of ideas)",
    "Hanging": "does not answer within 1 seconds",
}


@pytest.fixture
def runtime(request):
    kind = getattr(crashing, request.param)
    RUNTIMES.register(kind.name, override=True)(kind)
    return kind.name


@pytest.mark.parametrize("runtime", ["Dying"], indirect=True)
def test_crash_is_a_finding_with_the_operator(cases, runtime: str, monkeypatch) -> None:
    monkeypatch.setattr(RUNTIMES.get(runtime), "hazards", {"MANPATH": "manuals kill it", "NO_SUCH": "nothing"})
    monkeypatch.setenv("MANPATH", "/tmp")
    model, file, x = cases["onnxruntime", "attention"]
    proof = bw.verify(model, file, [x], runtimes=[runtime, "onnxruntime"], latency=False)
    line = "crashed with SIGSEGV; MANPATH is set: manuals kill it; it begins with softmax (Softmax)"
    assert proof.ok is False
    assert proof.missed == [f"{runtime}: {line}"]
    assert proof.runtimes[runtime].crash == line
    assert line in str(proof)
    assert proof.to_dict()["runtimes"][runtime]["crash"] == line
    assert proof.runtimes["onnxruntime"].equal > 0.99  # the other one's proof is not lost


@pytest.mark.parametrize(("runtime", "how"), DEATHS.items(), indirect=["runtime"])
def test_every_death_has_its_words(cases, monkeypatch, runtime: str, how: str) -> None:
    _, file, x = cases["onnxruntime", "attention"]
    monkeypatch.setattr(RUNTIMES.get(runtime), "timeout", 1.0 if runtime == "hanging" else 600.0)
    with pytest.raises(RuntimeDied) as caught:
        bw.run_file(file, runtime)(x)
    assert str(caught.value) == f"{runtime} {how}"


@pytest.mark.parametrize("runtime", ["Dying"], indirect=True)
def test_a_crash_elsewhere_leaves_other_files_alone(cases, runtime: str) -> None:
    model, file, x = cases["onnxruntime", "residual"]
    attention = cases["onnxruntime", "attention"]
    run = bw.run_file(attention[1], runtime)
    with pytest.raises(RuntimeDied, match="dying crashed with SIGSEGV"):
        run(attention[2])
    assert bw.verify(model, file, [x], runtimes=[runtime], latency=False).ok is True
    with pytest.raises(RuntimeDied, match="the process that loaded the file is gone"):
        run(attention[2])


def test_arrays_of_every_kind_come_through(cases) -> None:
    import socket

    import ml_dtypes

    from bitwright.verification.isolation.messages import describe, receive, restore, send

    arrays = {
        "a": np.arange(6, dtype=np.int8).reshape(2, 3),
        "b": np.array(1.5, np.float64),
        "c": np.zeros((0, 4), np.float32),
        "d": np.array([True, False]),
        "e": np.array([1.0, -2.0], ml_dtypes.bfloat16),
        "f": np.arange(12.0).reshape(3, 4).T,
    }
    here, there = socket.socketpair()
    with here, there:
        send(here, {"arrays": describe(arrays)}, list(arrays.values()))
        message, blobs = receive(there)
    found = restore(message["arrays"], blobs)
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value)


def test_an_error_is_not_a_crash(cases) -> None:
    _, file, x = cases["onnxruntime", "residual"]
    run = bw.run_file(file, "onnxruntime")
    with pytest.raises(VerifyError, match="cannot run the file on x float32") as caught:
        run(x[:, :2])
    assert not isinstance(caught.value, RuntimeDied)
    assert run(x).shape == (4, 4)


def test_one_child_serves_all_threads(cases) -> None:
    _, file, x = cases["onnxruntime", "residual"]
    run, found = bw.run_file(file, "onnxruntime"), []
    threads = [threading.Thread(target=lambda: found.append(run(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(bool((f == found[0]).all()) for f in found)
    child = child_of(RUNTIMES.get("onnxruntime")())
    assert child._process.pid != os.getpid()


def test_sessions_are_let_go(cases) -> None:
    _, file, x = cases["onnxruntime", "residual"]
    child = child_of(RUNTIMES.get("onnxruntime")())
    run = bw.run_file(file, "onnxruntime")
    run(x)
    waiting = len(child._dropped)
    del run
    assert len(child._dropped) == waiting + 1
    bw.run_file(file, "onnxruntime")(x)
    assert len(child._dropped) <= 1


def test_peak_memory_is_that_of_the_file(cases) -> None:
    """A file of 64 MB takes as much, one of a few kilobytes does not; a runtime in this process tells nothing."""
    model, file, x = cases["onnxruntime", "attention"]
    small = format_of(file).read(file)
    weight = numpy_helper.from_array(np.ones((4096, 4096), np.float32), "weight")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4096])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4096])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"], "product")], "g", [value], [result], [weight]
    )
    big = OnnxFile(file, helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), None)
    runtime = RUNTIMES.get("onnxruntime")()
    taken = runtime.peak_memory(big, {"x": np.zeros((1, 4096), np.float32)})
    little = runtime.peak_memory(small, {small.inputs[0]: x.numpy()})
    if not os.access("/proc/self/clear_refs", os.W_OK):
        assert (taken, little) == (None, None)
        return
    assert 64e6 < taken < 400e6
    assert 0 < little < 40e6
    assert bw.verify(model, file, [x], latency=False).runtimes["onnxruntime"].memory is None


def test_proof_has_the_peak_memory(cases, tmp_path) -> None:
    model, file, x = cases["onnxruntime", "attention"]
    proof = bw.verify(model, file, [x], runtimes=["onnxruntime"])
    found = proof.runtimes["onnxruntime"].memory
    if found is not None:
        assert found.share == found.quantized_bytes / found.float_bytes
        assert proof.to_dict()["runtimes"]["onnxruntime"]["memory"]["quantized_bytes"] == found.quantized_bytes
        assert "MB at the peak" in str(proof)
        assert "Peak memory against FP32" in bw.report(model, proof, tmp_path / "report.html").read_text()
    assert (found is None) == (not os.access("/proc/self/clear_refs", os.W_OK))
