"""Every width of integers, and fp8: in the lowest opset that has it, loaded by onnxruntime, equal to the simulation."""

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ExportError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(torch.relu(self.conv(x)).mean((2, 3)))))


# weights, activations: the opset, the type that weights are stored in, and the type of activations
CASES = {
    ("int8 channel:0", "uint8 affine"): (18, "INT8", "UINT8"),
    ("int8 channel:0", "uint16 affine"): (21, "INT8", "UINT16"),
    ("int16 channel:0", "int16"): (21, "INT16", "INT16"),
    ("int4 channel:0", "uint8 affine"): (18, "INT8", "UINT8"),
    ("uint4 affine channel:0", "uint8 affine"): (18, "UINT8", "UINT8"),
    ("int2 channel:0", "uint8 affine"): (18, "INT8", "UINT8"),
    ("int4 channel:0", "int4"): (18, "INT8", "INT8"),
    ("e4m3 channel:0", "e4m3"): (21, "FLOAT8E4M3FN", None),
    ("e5m2", "e5m2"): (21, "FLOAT8E5M2", None),
}


def prepared(weight: str, activation: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    return bw.calibrate(bw.prepare(Net().eval(), x, "virtual", weight=weight, activation=activation), [x]), [x]


def types(path: Path) -> tuple[int, Counter[str], Counter[str]]:
    """The opset, the types of weights, and those of activations."""
    model = onnx.load(path)
    name = onnx.TensorProto.DataType.Name
    stored = {i.name: name(i.data_type) for i in model.graph.initializer}
    weights = Counter(kind for tensor, kind in stored.items() if tensor.endswith("weight.integers"))
    quantizers = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and len(n.input) > 2]
    return model.opset_import[0].version, weights, Counter(stored[n.input[2]] for n in quantizers)


@pytest.mark.parametrize("specs", CASES, ids=" x ".join)
def test_every_width(specs: tuple[str, str], tmp_path: Path) -> None:
    model, data = prepared(*specs)
    file = bw.export(model, tmp_path / "net.onnx")
    opset, weights, activations = types(file.path)
    expected, stored, computed = CASES[specs]
    assert opset == expected
    assert set(weights) == {stored}
    assert set(activations) == ({computed} if computed else set())
    proof = bw.verify(model, file, data, runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed


@pytest.mark.parametrize(
    ("weight", "kind"), [("int4 channel:0", "INT4"), ("uint4 affine channel:0", "UINT4"), ("int2", "INT4")]
)
def test_packed_weights(weight: str, kind: str, tmp_path: Path) -> None:
    model, data = prepared(weight, "uint8 affine")
    with pytest.raises(ExportError, match=rf"opset 20 cannot express {kind.lower()} for conv\.weight, which needs 21"):
        bw.export(model, tmp_path / "net.onnx", pack_weights=True, opset_version=20)
    file = bw.export(model, tmp_path / "net.onnx", pack_weights=True)
    assert types(file.path)[:2] == (21, Counter({kind: 3}))
    sizes = {i.name: len(i.raw_data) for i in onnx.load(file.path).graph.initializer}
    assert sizes["fc.weight.integers"] == 16 * 32 // 2
    proof = bw.verify(model, file, data, runtimes=["onnxruntime"], latency=False)
    assert proof.ok, proof.missed
