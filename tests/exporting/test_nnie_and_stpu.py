"""Bundles of targets with numbers that follow from others: NNIE's logarithmic levels, STPU's steps and exponents."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import bitwright as bw
from bitwright.errors import ExportError, VerifyError
from bitwright.exporting import FORMATS
from bitwright.exporting.bundles.base import BUNDLE, Contents
from bitwright.exporting.bundles.ranges import Place


class Net(nn.Module):
    """An upsampling, a max-pool that moves values, a convolution in groups, a gate, a concatenation, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, groups=8)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.interpolate(self.stem(x).relu(), scale_factor=2), 2)
        x = self.deep(x)
        x = torch.cat([x * torch.sigmoid(x), x], 1)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def quantized(backend: str, **wishes: object) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 10, 10)
    return bw.calibrate(bw.prepare(Net().eval(), x, backend=backend, **wishes), [x]), x


def contents_of(path: Path) -> Contents:
    """The model of a bundle and its places, as a reader sees them."""
    model = onnx.load(path)
    note = json.loads(next(e.value for e in model.metadata_props if e.key == BUNDLE))
    return Contents(model, tuple(Place.from_json(p) for p in note["places"]))


def test_parameters_of_nnie_are_proven(tmp_path: Path) -> None:
    model, x = quantized("nnie")
    file = bw.export(model, tmp_path / "net.onnx")
    assert [f.name for f in file.files] == ["net.onnx", "net.gfpq_param_dict.json"]
    data = json.loads(file.files[1].read_text())
    entries = data["nnie"]["gfpq_param_dict"]
    named = {"stem", "interpolate", "interpolate_permute_0", "max_pool2d", "cat", "fc"}
    assert named <= entries.keys() <= {*named, "adaptive_avg_pool2d"}
    assert len(entries["cat"]) == 1  # the gated tensor is float
    largest = 2 ** (round(16 * math.log2(float(x.abs().max()))) / 16)  # a whole number of steps of the logarithm
    assert entries["stem"] == [pytest.approx(largest, rel=1e-6)]
    assert entries["max_pool2d"] == entries["interpolate"]  # what only moves keeps its range
    assert "deep" not in entries  # NNIE has no parameters of groups
    proof = bw.verify(model, file, [x, 0.7 * x], latency=False)
    assert proof.ok, proof
    assert proof.runtimes["reference"].largest == 0
    assert {v.constraint for v in proof.violations} == {"nnie-entries"}
    clean = onnx.load(file.path)
    assert not {"Where", "Gather", "Max"} & {n.op_type for n in clean.graph.node}
    got = onnxruntime.InferenceSession(str(file)).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        assert np.abs(got - model(x).numpy()).max() < 0.1 * np.abs(got).max()


def test_weights_of_nnie_are_what_its_levels_give(tmp_path: Path) -> None:
    model, _ = quantized("nnie")
    clean = onnx.load(bw.export(model, tmp_path / "net.onnx").path)
    weights = [numpy_helper.to_array(i) for i in clean.graph.initializer if len(i.dims) > 1 and i.data_type == 1]
    assert len(weights) == 3
    for weight in weights:
        steps = 16 * np.log2(np.abs(weight[weight != 0]).astype(np.float64))
        assert np.abs(steps - np.rint(steps)).max() < 1e-4
    with torch.no_grad():
        model.get_submodule("stem").weight_quantizer.set_range(-50, 50)
    with pytest.raises(ExportError, match=r"NNIE uses the largest magnitude of weights .* stem.weight"):
        bw.export(model, tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"weight": {"spec": "int8 symmetric tensor", "method": "FixedFakeQuantize"}}, "has evenly spaced integers"),
        ({"activation": {"spec": "int8 symmetric tensor", "method": "FixedFakeQuantize"}}, "has evenly spaced"),
    ],
)
def test_other_levels_than_those_of_nnie_are_refused(rule: dict, message: str, tmp_path: Path) -> None:
    model, _ = quantized("nnie", recipe=rule)
    with pytest.raises(ExportError, match=message):
        bw.export(model, tmp_path / "net.onnx")
    apot = {"spec": "int8 symmetric tensor", "method": "apot"}
    model, _ = quantized("virtual", recipe={"weight": apot, "activation": apot})
    with pytest.raises(ExportError, match=r"levels, which are not those of the target for a whole tensor"):
        bw.export(model, tmp_path / "net.onnx", format="nnie")
    assert list(tmp_path.iterdir()) == []


def nnie_mistakes(data: dict) -> dict[str, str]:
    """Parameter files with one mistake each, by the message about it."""

    def changed(change: object) -> str:
        made = json.loads(json.dumps(data))
        change(made["nnie"]["gfpq_param_dict"])
        return json.dumps(made)

    return {
        "do not both have a quantized layer 'stem'": changed(lambda e: e.pop("stem")),
        "do not both have a quantized layer 'other'": changed(lambda e: e.update(other=[1.0])),
        "has 2 values of 'fc', not 1": changed(lambda e: e["fc"].append(1.0)),
        "has two ranges of": changed(lambda e: e.update(interpolate_permute_0=[9.0])),
        "not more than 0": changed(lambda e: e.update(fc=[-1.0])),
        "lacks 'nnie'": "{}",
        "is not JSON": "{",
    }


def test_mistakes_in_parameters_of_nnie_are_named(tmp_path: Path) -> None:
    model, _ = quantized("nnie")
    file = bw.export(model, tmp_path / "net.onnx")
    reader, contents, side = FORMATS.get("nnie")(), contents_of(file.path), ".gfpq_param_dict.json"
    assert len(reader.checked({side: file.files[1].read_text()}, contents)) == len(contents.places)
    for message, text in nnie_mistakes(json.loads(file.files[1].read_text())).items():
        with pytest.raises(VerifyError, match=message):
            reader.checked({side: text}, contents)


def test_stpu_fixes_the_range_of_a_sigmoid(tmp_path: Path) -> None:
    model, x = quantized("stpu")
    file = bw.export(model, tmp_path / "net.onnx")
    data = json.loads(file.files[1].read_text())
    assert data["sigmoid"] == {"min": pytest.approx(-1), "max": pytest.approx(1)}
    assert bw.verify(model, file, [x], latency=False).ok
    asked = {"rules": [{"match": "sigmoid", "output": {"observer": "MinMaxObserver"}}]}
    with pytest.raises(Exception, match="sigmoid"):
        quantized("stpu", recipe=asked)


def test_steps_and_exponents_of_stpu_follow_from_its_ranges(tmp_path: Path) -> None:
    model, _ = quantized("stpu")
    file = bw.export(model, tmp_path / "net.onnx")
    data = json.loads(file.files[1].read_text())
    weight = data["stem_weights"]["max"] / 127
    assert data["stem_bias"] == {"alpha": pytest.approx(weight * data["x"]["max"] / 127), "zero_point": 0}
    reached = math.sqrt(3 * 9) * data["x"]["max"] * data["stem_weights"]["max"]
    stem = data["stem"]
    assert (stem["min"], stem["max"]) == (data["relu"]["min"], data["relu"]["max"])  # what a ReLU reads
    assert stem["emin"] == math.floor(math.log2(max(reached, stem["max"]))) + 127 - 10
    reader, contents = FORMATS.get("stpu")(), contents_of(file.path)
    mistakes = {
        "has the alpha": ("stem_bias", {"alpha": 1.0}),
        "has the emin 3": ("stem", {"emin": 3}),
        "has no step for the bias": ("stem_bias", None),
        "gives 'stem' and 'relu' different ranges": ("stem", {"max": 1.0}),
    }
    for message, (name, change) in mistakes.items():
        wrong = {n: dict(e) for n, e in data.items() if n != name or change is not None}
        if change is not None:
            wrong[name] |= change
        with pytest.raises(VerifyError, match=message):
            reader.checked({".minmax.json": json.dumps(wrong)}, contents)
