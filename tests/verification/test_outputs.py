"""Outputs: all there, in order, of one shape and type, finite where the simulation is; else words, and no proof."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.graph import Inputs
from bitwright.verification.outputs import OutputTally, difference
from tests.verification.nets import tampered


def judged(model: nn.Module, file: Path, x: Tensor) -> bw.verification.Proof:
    return bw.verify(model, file, [x], runtimes=["onnxruntime"], latency=False)


def test_nested_outputs_are_all_compared(several) -> None:
    model, file, x = several
    proof = judged(model, file, x)
    outputs = proof.runtimes["onnxruntime"].outputs
    assert proof.ok is True
    assert len(outputs) == 3
    assert all(o.relative < 1e-5 and o.local < 1e-5 and o.steps == 0.0 for o in outputs)


def test_swapped_outputs(several, tmp_path: Path) -> None:
    model, file, x = several

    def swap(loaded: onnx.ModelProto) -> None:
        outputs = list(loaded.graph.output)
        del loaded.graph.output[:]
        loaded.graph.output.extend([outputs[1], outputs[0], outputs[2]])

    proof = judged(model, tampered(file, tmp_path / "swapped.onnx", swap), x)
    assert proof.ok is False
    assert sum("computed from the runtime's own quantized tensors differs" in m for m in proof.missed) == 2


def test_outputs_in_another_order_of_shapes(several, tmp_path: Path) -> None:
    model, file, x = several
    proof = judged(model, tampered(file, tmp_path / "turned.onnx", lambda m: m.graph.output.reverse()), x)
    assert proof.ok is False
    assert any("has the shape [16, 3], in the simulation [16, 4]" in m for m in proof.missed)


def test_missing_output(several, tmp_path: Path) -> None:
    model, file, x = several
    proof = judged(model, tampered(file, tmp_path / "missing.onnx", lambda m: m.graph.output.pop()), x)
    assert proof.ok is False
    assert any("the output number 3 is missing in the file" in m for m in proof.missed)


def test_output_too_many(several, tmp_path: Path) -> None:
    model, file, x = several

    def add(loaded: onnx.ModelProto) -> None:
        first = loaded.graph.output[0]
        loaded.graph.node.append(onnx.helper.make_node("Identity", [first.name], ["extra"], name="extra"))
        loaded.graph.output.add().CopyFrom(first)
        loaded.graph.output[-1].name = "extra"

    proof = judged(model, tampered(file, tmp_path / "extra.onnx", add), x)
    assert proof.ok is False
    assert any("the output extra is one too many: the simulation has 3" in m for m in proof.missed)


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_nan_is_an_infinite_difference(several, tmp_path: Path, share: float) -> None:
    """All NaN passed every limit once, as max(0.0, nan) is 0.0."""
    model, file, x = several

    def spoil(loaded: onnx.ModelProto) -> None:
        bias = next(i for i in loaded.graph.initializer if i.name == "c.weight.scale")
        values = onnx.numpy_helper.to_array(bias).copy()
        values[: max(1, int(values.size * share))] = np.nan
        bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))

    proof = judged(model, tampered(file, tmp_path / "nan.onnx", spoil), x)
    assert proof.ok is False
    worst = proof.runtimes["onnxruntime"].outputs[2]
    assert worst.largest == worst.relative == worst.local == float("inf")


def test_difference_of_special_values() -> None:
    nan, inf = float("nan"), float("inf")
    ours = torch.tensor([1.0, nan, nan, 1.0, inf, inf, -inf, inf])
    theirs = torch.tensor([1.5, nan, 1.0, nan, inf, -inf, -inf, 1.0])
    assert difference(ours, theirs).tolist() == [0.5, 0.0, inf, inf, 0.0, inf, 0.0, inf]
    assert difference(torch.tensor([7, 8]), torch.tensor([7, 1000])).tolist() == [0.0, 1.0]
    assert difference(torch.tensor([True, False]), torch.tensor([True, True])).tolist() == [0.0, 1.0]


def test_nan_of_the_simulation_itself_is_equal(tmp_path: Path) -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(self.fc(x))

    torch.manual_seed(0)
    x = torch.randn(32, 8)
    model = bw.calibrate(bw.prepare(Logs().eval(), x), [x])
    assert model(x).isnan().any()
    proof = judged(model, bw.export(model, tmp_path / "logs.onnx").path, x)
    assert proof.ok is True
    assert proof.runtimes["onnxruntime"].outputs[0].relative < 1e-4


@dataclass
class Found:
    """A result as users write it."""

    scores: Tensor
    classes: Tensor
    more: dict[str, Tensor]


class Results(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> object:
        a, b = self.a(x), self.b(x)
        match self.kind:
            case "dataclass":
                return Found(a, a.argmax(-1), {"z": b, "a": a * 2})
            case "dict":
                return {"z": b, "a": a, "m": [a * 2, (b * 3,)]}
            case "ordered":
                return OrderedDict(z=a, a=b)
            case "with None":
                return a, None, b
            case "with a number":
                return a, 5, b
            case "twice":
                return a, b, a
            case "input":
                return x, a
            case _:
                return (a > 0, a, a.sum(), b.to(torch.float64))


@pytest.mark.parametrize(
    "kind", ["dataclass", "dict", "ordered", "with None", "with a number", "twice", "input", "types"]
)
def test_results_of_every_kind_are_compared_in_order(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = bw.calibrate(bw.prepare(Results(kind).eval(), x), [x])
    file = bw.export(model, tmp_path / "results.onnx").path
    proof = judged(model, file, x)
    expected = {"dataclass": 4, "dict": 4, "twice": 3, "types": 4}.get(kind, 2)
    assert len(proof.runtimes["onnxruntime"].outputs) == expected
    assert proof.missed == []


def test_what_equals_the_simulation_needs_no_watched_tensors() -> None:
    """A value on a rounding border may be rounded differently while it is watched."""
    x = torch.tensor([1.0, -2.0, 4.0])
    for result, local in ((x, 0.0), (x + 0.4, 0.05)):
        tally = OutputTally(["y"], set())
        tally.add(nn.Identity(), Inputs((x,), {}), {"y": result.numpy()}, x + 0.2)
        assert tally.checks()[0].local == pytest.approx(local, rel=1e-4)
