"""What works with which extras: each install in an interpreter that cannot import the packages it lacks."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in {absent} else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
"""
PREPARE = """
import torch, bitwright as bw
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
x = torch.randn(4, 3, 8, 8)
q = bw.calibrate(bw.prepare(model, x, backend={backend!r}), [x])
assert (q(x) - model(x)).abs().max() < 0.2
"""
PROVE = """
bw.export(q, "model.onnx")
proof = bw.verify(q, "model.onnx", [x], latency=False)
assert list(proof.runtimes) == [{backend!r}] and proof.ok, proof
print(len(bw.analyze(q, [x])))
bw.report(q, proof, "report.html", batches=[x])
"""
pytestmark = pytest.mark.slow
ONNX, ORT, OPENVINO = {"onnx", "onnxscript", "onnx_ir"}, {"onnxruntime"}, {"openvino"}


def run(absent, code, folder):
    """Run code where some packages cannot be imported; return its exit code and its last line of errors."""
    program = WITHOUT.format(absent=absent) + code
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.strip()


def test_the_base_install_quantizes_and_names_the_extra_that_export_needs(tmp_path):
    code = PREPARE.format(backend="onnxruntime")
    assert run(ONNX | ORT | OPENVINO, code, tmp_path) == (0, "")
    code, errors = run(ONNX | ORT | OPENVINO, code + "bw.export(q, 'model.onnx')", tmp_path)
    assert code == 1
    told = "the format onnx needs the package 'onnx', which is not installed: pip install 'bitwright[onnx]'"
    assert errors.splitlines()[-1].endswith(f"MissingExtraError: {told}")


@pytest.mark.parametrize(("backend", "absent"), [("onnxruntime", OPENVINO), ("openvino", ORT)])
def test_each_runtime_works_without_the_other(tmp_path, backend, absent):
    code = (PREPARE + PROVE).format(backend=backend)
    assert run(absent, code, tmp_path) == (0, "")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("backend", "absent", "extra"), [("onnxruntime", ORT, "onnx"), ("openvino", OPENVINO, "openvino")]
)
def test_a_missing_runtime_is_named_with_its_extra(tmp_path, backend, absent, extra):
    code = (PREPARE + PROVE).format(backend=backend).replace("latency=False", f"latency=False, runtimes=[{backend!r}]")
    status, errors = run(absent, code, tmp_path)
    assert status == 1
    assert f"pip install 'bitwright[{extra}]'" in errors.splitlines()[-1]
