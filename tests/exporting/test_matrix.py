"""Every backend on nets of all kinds: the file loads where its target runs, or keeps what its target demands."""

from pathlib import Path

import pytest
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS
from bitwright.exporting import FORMATS
from bitwright.verification import RUNTIMES, Proof, View
from bitwright.verification.alone import format_of
from tests.exporting.probes import Block, Everything, Residual, built, inputs

WRITES = [name for name in BACKENDS if BACKENDS.get(name).formats]
CHOSEN = {"recipe": {"weight": "int4 channel:0", "activation": "uint4"}}  # papers leave the specs to the user


@pytest.fixture(scope="module")
def everything() -> nn.Module:
    return built(Everything)


def proven(net: nn.Module, backend: str, folder: Path, **wishes: object) -> tuple[Proof, View]:
    """Calibrate on sequences of one length, and prove on two."""
    if backend.startswith("academic"):
        wishes = CHOSEN
    model = bw.prepare(net, inputs(net), backend, **wishes)
    bw.calibrate(model, [inputs(net), inputs(net, seed=2)], progress=False)
    file = bw.export(model, folder / "net.onnx")
    data = [inputs(net, seed=3), inputs(net, length=9, seed=4)]
    proof = bw.verify(model, file, data, latency=False, progress=False)
    view = View.of(format_of(file.path).read(file.path))
    assert view is not None
    return proof, view


@pytest.mark.slow
@pytest.mark.parametrize("backend", WRITES)
def test_file_of_every_backend_is_proven(everything: nn.Module, backend: str, tmp_path: Path) -> None:
    proof, view = proven(everything, backend, tmp_path)
    assert proof.ok, proof
    assert [str(v) for v in proof.violations if not v.advice] == []
    assert bool(proof.constraints) == bool(BACKENDS.get(backend).constraints)
    target = next(iter(BACKENDS.get(backend).runtimes), "reference")
    assert next(iter(proof.runtimes)) in (target, "reference")
    for found in proof.runtimes.values():
        assert found.largest in (0, 1)
        assert not found.uncompared
        assert len(found.outputs) == 4
    assert bool(view.of_kind("weight")) == (backend != "nnie")  # whose weights are places in tables


SECOND = [name for name in WRITES if len(BACKENDS.get(name).formats) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", SECOND)
def test_other_formats_of_every_backend_are_proven(everything: nn.Module, backend: str, tmp_path: Path) -> None:
    model = bw.prepare(everything, inputs(everything), backend)
    bw.calibrate(model, [inputs(everything), inputs(everything, seed=2)], progress=False)
    data = [inputs(everything, seed=3), inputs(everything, length=9, seed=4)]
    for name in BACKENDS.get(backend).formats[1:]:
        file = bw.export(model, tmp_path / f"{name}{FORMATS.get(name).suffix}", format=name)
        proof = bw.verify(model, file, data, latency=False, progress=False)
        assert proof.ok, (name, proof)
        assert proof.changes == []
        for found in proof.runtimes.values():
            assert found.largest in (0, 1)
            assert not found.uncompared


@pytest.mark.slow
@pytest.mark.skipif(not RUNTIMES.get("inductor").available(), reason="there is no C++ compiler")
def test_program_of_a_network_with_transposed_convolutions_is_proven(tmp_path: Path) -> None:
    net = built(Residual)
    model = bw.calibrate(bw.prepare(net, inputs(net), "onnxruntime"), [inputs(net)], progress=False)
    file = bw.export(model, tmp_path / "net.pt2", format="torch")
    proof = bw.verify(model, file, [inputs(net, seed=3)], latency=False, progress=False)
    assert proof.ok, proof


CASES = {
    "quantized result": (Residual, "snpe", {}, "activation", 8),
    "16-bit activations": (Residual, "virtual", {"activation": "uint16 affine tensor"}, "activation", 16),
    "4-bit weights": (Residual, "tensorrt", {"weight": "int4 narrow channel:0"}, "weight", 4),
    "4-bit groups": (Block, "virtual", {"weight": "int4 group:8"}, "weight", 4),
    "8-bit weights": (Residual, "onnxruntime", {"weight": "int8 narrow channel:0"}, "weight", 8),
}


@pytest.mark.parametrize("case", CASES)
def test_file_with_other_numbers_is_proven(case: str, tmp_path: Path) -> None:
    net, backend, wishes, kind, bits = CASES[case]
    proof, view = proven(built(net), backend, tmp_path, **wishes)
    assert proof.ok, proof
    assert {t.bits for t in view.of_kind(kind)} == {bits}
    if case == "quantized result":
        assert set(view.outputs) <= {name for t in view.tensors for name in t.results}
