"""``--format`` and what else is said of the file: every format is written and proven from the command line."""

import json

import onnx
import pytest

from tests.cli.conftest import QUANTIZE

FORMATS = {
    "onnx": "tensorrt",
    "qoperator": "onnxruntime",
    "tensorrt-ranges": "tensorrt",
    "qualcomm-0.6.1": "snpe",
    "qualcomm-2.0.0": "onnx_qnn",
    "ppl": "pplcuda",
    "vitis": "vitis",
    "tengine": "tengine_u8",
    "stpu": "stpu",
}
NAMES = ["--input-name", "image", "--output-name", "scores", "--opset", "20", "--dynamic", "x:0=n"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, run, here):
    more = NAMES if format == "qoperator" else []
    code, out, _ = run(*QUANTIZE, "--backend", FORMATS[format], "--format", format, "--no-latency", "--json", *more)
    data = json.loads(out)
    assert (code, data["ok"], data["missed"]) == (0, True, [])
    model = onnx.load(here / data["file"])
    record = next(e.value for e in model.metadata_props if e.key == "bitwright.record")
    assert json.loads(record)["format"] == format
    if more:
        assert [e.name for e in (*model.graph.input, *model.graph.output)] == ["image", "scores"]
        assert {o.domain: o.version for o in model.opset_import}[""] == 20
        shape = model.graph.input[0].type.tensor_type.shape
        assert [d.dim_param or d.dim_value for d in shape.dim] == ["n", 3, 8, 8]


def test_openvino_ir(run, here):
    pytest.importorskip("openvino")
    code, out, _ = run(*QUANTIZE, "--backend", "openvino", "--format", "openvino", "--no-latency", "--json")
    data = json.loads(out)
    assert data["ok"], data["proof"]["missed"]
    assert (code, data["file"]) == (0, "out/model.xml")
    assert sorted(p.name for p in (here / "out").iterdir()) == ["model.bin", "model.xml", "report.html"]


def test_a_saved_model_takes_them(run, here):
    assert run(*QUANTIZE, "--save", "saved", "--no-verify")[0] == 0
    code, _, _ = run("export", "saved", "-o", "again.onnx", *NAMES, "--external-data", "--format", "onnx")
    assert code == 0
    assert (here / "again.onnx.data").is_file()
    model = onnx.load(here / "again.onnx")
    assert [e.name for e in (*model.graph.input, *model.graph.output)] == ["image", "scores"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "qoperato"], "unknown format 'qoperato': did you mean 'qoperator'?"),
        (["--output-name", "a", "--output-name", "a"], "output_names has 'a' twice"),
        (["--input-name", "a", "--input-name", "b"], "input_names has 2 names, and the model has 1 input ('x')"),
        (["--opset", "11"], "opset_version must be from 18 to"),
        (["--dynamic", "x"], "--dynamic 'x' is not ARGUMENT:AXIS=SIZE, as x:0=batch"),
        (["--dynamic", "y:0=n"], "dynamic_shapes names 'y', and the model takes x"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, refused):
    assert message in refused(*QUANTIZE, "--no-verify", *arguments)
