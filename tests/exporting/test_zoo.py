"""The zoo, all the way: exact parity, and a file with free sizes that is proven at two of them in each runtime."""

from pathlib import Path

import onnx
import pytest
import torch

import bitwright as bw
from bitwright.errors import ExportError
from tests.graph.capture.capturing import same
from tests.graph.passes.test_zoo import built
from tests.zoo import ZOO

NETS = ["ManyClasses", "Parametrized", "Experts", "DenseExperts", "Generator", "GptStep", "Reused", "Features", "Tied"]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_net_is_proven_at_two_sizes(runtime: str, name: str, tmp_path: Path) -> None:
    case, model = ZOO[name], built(name)
    sizes = [(2, case.size), (3, case.other)]
    quantized = bw.prepare(model, case.inputs(*sizes[0]), backend=runtime)
    with torch.no_grad():
        for size in sizes:
            inputs = case.inputs(*size)
            assert same(case.call(quantized, inputs), case.call(model, inputs))
    bw.calibrate(quantized, [case.inputs(*size) for size in sizes])
    file = bw.export(quantized, tmp_path / "net.onnx")
    for given in onnx.load(file.path).graph.input:
        free = [d.dim_param for d in given.type.tensor_type.shape.dim if d.dim_param]
        assert free[0] == "batch"
        assert len(free) > 1 or name == "GptStep"
    proof = bw.verify(quantized, file, [case.inputs(*size) for size in sizes], runtimes=[runtime], latency=False)
    assert proof.ok, proof.missed


def test_python_that_depends_on_data_is_refused_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case, model = ZOO["PackedTagger"], built("PackedTagger")
    quantized = bw.calibrate(bw.prepare(model, case.inputs(2, 6)), [case.inputs(4, 6)])
    with pytest.raises(ExportError, match=r"a file holds no Python: encoder \(.*tolist.* at .*sequences.py:\d+\)"):
        bw.export(quantized, tmp_path / "net.onnx")
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
