"""Files for backends run as simulated."""

import pytest

import bitwright as bw
from bitwright.backends import BACKENDS, find_backend
from tests.backends.probe import images, prepared


def exported(name, tmp_path, format=None, **more):
    model = prepared(name, **more)
    bw.calibrate(model, [images()], progress=False)
    return model, bw.export(model, tmp_path / "model.onnx", format=format)


@pytest.mark.parametrize("name", ["qdq", "onnx_qnn"])
def test_q_dq_files_run_in_onnxruntime_as_simulated(name, tmp_path):
    model, file = exported(name, tmp_path)
    proof = bw.verify(model, file, [images(seed=5)], latency=False, progress=False)
    (found,) = proof.runtimes.values()
    assert (found.runtime, found.largest) == ("onnxruntime", 0)
    assert max(o.relative for o in found.outputs) < 1e-5


def test_sixteen_bit_activations_are_written_as_such(tmp_path):
    import onnx

    model, file = exported("pplw8a16", tmp_path, "onnx")
    kinds = {i.name: i.data_type for i in onnx.load(file).graph.initializer}
    assert onnx.TensorProto.UINT16 in {*kinds.values(), *_constant_types(file)}
    proof = bw.verify(model, file, [images()], latency=False)
    assert (proof.ok, list(proof.runtimes)) == (True, ["reference"])
    assert "3 of the 3 constraints published for pplw8a16 are kept; this leaves unproven the kernels" in proof.notes[0]


WEIGHTS = [
    (backend.name, format)
    for backend in map(find_backend, BACKENDS)
    if backend.formats[0] != "onnx"
    for format in sorted(backend.weights.formats)
]


@pytest.mark.parametrize(("name", "format"), WEIGHTS)
def test_the_weights_that_a_backend_has_are_those_that_its_files_hold(name, format, tmp_path):
    _, _, rest = str(find_backend(name).weights.spec).partition(" ")
    model, file = exported(name, tmp_path, weight=f"{format} {rest}")
    proof = bw.verify(model, file, [images()], latency=False, progress=False)
    assert proof.ok, proof.missed


def _constant_types(file):
    import onnx

    nodes = onnx.load(file).graph.node
    return {a.i for n in nodes if n.op_type == "Cast" for a in n.attribute if a.name == "to"}


def test_a_logarithmic_grid_is_a_table_of_values(tmp_path):
    model, file = exported("nnie", tmp_path)
    proof = bw.verify(model, file, [images()], latency=False)
    assert (proof.ok, list(proof.runtimes)) == (True, ["reference"])
