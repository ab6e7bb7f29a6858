"""The format ``qoperator``: integer operators in the file, the same bits as Q/DQ, and a proof as for Q/DQ."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import VerifyError
from bitwright.exporting.formats.base import format_of
from bitwright.exporting.onnx.qoperator import split_quantizers


class Net(nn.Module):
    """Every operator that becomes an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skip = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1, bias=False)
        self.rows, self.bare, self.head = nn.Linear(12, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = F.leaky_relu(x + self.skip(x), 0.2)
        x = torch.cat([F.max_pool2d(x, 2), F.avg_pool2d(x, 2)], 1)
        x = x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1))
        x = self.bare(self.rows(x.flatten(2).transpose(1, 2)))
        x = torch.relu(x @ x.transpose(1, 2)) @ x
        return self.head(torch.relu(x.mean(1)))


KINDS = {
    *("QLinearConv", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearAveragePool", "QLinearLeakyRelu"),
    *("QLinearGlobalAveragePool", "QLinearSigmoid", "QLinearMatMul", "MatMulIntegerToFloat", "QGemm"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Path, Tensor]:
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("qoperator"), torch.randn(4, 3, 8, 8)
    model = bw.prepare(Net().eval(), x, "onnxruntime")
    bw.calibrate(model, [torch.randn(8, 3, 8, 8) for _ in range(2)])
    joined, plain = folder / "joined.onnx", folder / "plain.onnx"
    bw.export(model, joined, format="qoperator")
    bw.export(model, plain)
    return model, joined, plain, x


def test_the_file_has_integer_operators_and_the_same_bits(written: tuple[nn.Module, Path, Path, Tensor]) -> None:
    _, joined, plain, x = written
    proto = onnx.load(joined)
    kinds = {node.op_type for node in proto.graph.node}
    assert kinds >= KINDS
    assert {entry.domain for entry in proto.opset_import} == {"", "com.microsoft"}
    found = bw.run_file(joined)(x)
    assert torch.equal(found, bw.run_file(plain)(x))
    assert torch.equal(bw.run_file(joined)(x[:1]), found[:1])
    in_float = [bw.run_file(path, quantized=False)(x) for path in (joined, plain)]
    assert torch.equal(*in_float)


def test_verify_proves_it_as_the_plain_file(written: tuple[nn.Module, Path, Path, Tensor]) -> None:
    model, joined, plain, x = written
    ours, theirs = (bw.verify(model, path, [x], runtimes=["onnxruntime"], latency=False) for path in (joined, plain))
    found, expected = ours.runtimes["onnxruntime"], theirs.runtimes["onnxruntime"]
    assert ours.ok
    assert found.largest is not None
    assert found.largest <= 1
    assert {t.name for t in found.compared} == {t.name for t in expected.compared}
    assert expected.coverage_multiply_adds in (None, found.coverage_multiply_adds)  # sizes may not be inferred there
    assert format_of(joined).read(joined).constant("rows.weight.integers").shape == (12, 12)


def test_splitting_gives_the_plain_operators_back(written: tuple[nn.Module, Path, Path, Tensor]) -> None:
    _, joined, plain, _ = written
    split = split_quantizers(onnx.load(joined))
    onnx.checker.check_model(split, full_check=True)
    kinds = [n.op_type for n in split.graph.node]
    assert not KINDS & set(kinds)
    convolutions = [n for n in onnx.load(plain).graph.node if n.op_type == "Conv"]
    assert kinds.count("Conv") == len(convolutions) == 2


def test_weights_that_were_swapped_are_refused(written: tuple[nn.Module, Path, Path, Tensor], tmp_path: Path) -> None:
    model, joined, _, x = written
    broken = onnx.load(joined)
    weight = next(i for i in broken.graph.initializer if i.name == "stem.weight.integers")
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.flip(values, 0).copy(), weight.name))
    onnx.save(broken, tmp_path / "broken.onnx")
    with pytest.raises(VerifyError, match="cannot be trusted"):
        bw.verify(model, tmp_path / "broken.onnx", [x])
    with pytest.raises(VerifyError, match=r"openvino executes onnx.*, not qoperator"):
        bw.verify(model, joined, [x], runtimes=["openvino"])
