"""Programs of torch.export: run by PyTorch alone, proven in inductor, refused if they are not what was written."""

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ConfigError, ExportError, VerifyError
from bitwright.torch_internals import decomposed_quantizers
from bitwright.verification import RUNTIMES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.body = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.bn(self.stem(x)))
        y = self.body(y) + y
        return self.fc(self.pool(y).flatten(1)), y


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    return bw.calibrate(bw.prepare(Net().eval(), x, "onnxruntime"), [x])


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bw.export(model, tmp_path_factory.mktemp("made") / "net.pt2", format="torch").path


def batch(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))


def test_pytorch_alone_runs_it(model: nn.Module, file: Path) -> None:
    decomposed_quantizers()
    program = torch.export.load(file)
    used = {str(n.target).partition(".")[0] for n in program.graph.nodes if n.op == "call_function"}
    assert used <= {"aten", "quantized_decomposed", "<built-in function getitem>"}
    weights = {t.dtype for name, t in program.state_dict.items() if name.endswith("weight.integers")}
    assert weights == {torch.int8}
    for x in (batch(2), batch(5)):  # the batch size is free
        for ours, theirs in zip(model(x), program.module()(x), strict=True):
            assert (ours - theirs).abs().max() <= 0.02 * ours.abs().max()


@pytest.mark.skipif(not RUNTIMES.get("inductor").available(), reason="there is no C++ compiler")
def test_inductor_runs_it_in_integers(model: nn.Module, file: Path) -> None:
    proof = bw.verify(model, file, [batch()], latency=False)
    assert proof.ok, proof.missed
    found = proof.runtimes["inductor"]
    assert [t.name for t in found.tensors if t.largest is None] == []
    layers = {o.name: (o.integer, o.runs_as) for o in found.operators if o.kind in ("conv2d", "linear")}
    assert layers == {"stem": (True, "qconv"), "body": (True, "qconv"), "fc": (True, "qlinear")}
    assert found.coverage_multiply_adds == 1
    assert found.coverage < 1  # the sum and the pool run in float


def test_what_is_not_what_was_written_is_refused(model: nn.Module, file: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.pt2"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(edited, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            changed = name.endswith("weights/weight_0")
            target.writestr(name, bytes([content[0] ^ 1]) + content[1:] if changed else content)
    with pytest.raises(VerifyError, match="cannot be trusted: it was changed after Bitwright wrote it"):
        bw.verify(model, edited, [batch()])
    edited.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(VerifyError, match=r"is not a complete program of torch.export|cannot be trusted"):
        bw.verify(model, edited, [batch()])
    edited.write_bytes(b"PK")
    with pytest.raises(VerifyError, match=r"is not a complete program of torch.export: File is not a zip file"):
        bw.verify(model, edited, [batch()])
    torch.export.save(torch.export.export(nn.Linear(3, 4), (torch.randn(2, 3),)), edited)
    with pytest.raises(VerifyError, match="was not written by Bitwright"):
        bw.verify(model, edited, [batch()])


def test_what_it_cannot_say_is_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opset_version is for ONNX files, not for the format torch"):
        bw.export(model, tmp_path / "net.pt2", format="torch", opset_version=20)
    x = torch.randn(2, 8)
    for weight, message in (
        ("int4 group:4", "groups of scales, which 0.weight has"),
        ("e4m3", "only integers, and 0.w"),
    ):
        grouped = bw.calibrate(bw.prepare(nn.Sequential(nn.Linear(8, 4)).eval(), x, "virtual", weight=weight), [x])
        with pytest.raises(ExportError, match=message):
            bw.export(grouped, tmp_path / "net.pt2", format="torch")


TRANSPOSED = {
    "as wide": nn.ConvTranspose2d(8, 8, 3, padding=1),
    "strided": nn.ConvTranspose2d(8, 4, 2, stride=2),
    "dilated": nn.ConvTranspose2d(8, 8, 3, dilation=2),
    "grouped": nn.ConvTranspose2d(8, 8, 3, groups=2),
}


@pytest.mark.skipif(not RUNTIMES.get("inductor").available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_convolutions_are_not_taken_for_convolutions(kind: str, tmp_path: Path) -> None:
    x, layer = torch.randn(2, 8, 6, 6), TRANSPOSED[kind]
    net = nn.Sequential(layer, nn.ReLU(), nn.Conv2d(layer.out_channels, 4, 1)).eval()
    model = bw.calibrate(bw.prepare(net, x, "openvino"), [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "net.pt2", format="torch"), [x], latency=False)
    assert proof.ok, proof
    assert [o.integer for o in proof.runtimes["inductor"].operators] == [False, True]
