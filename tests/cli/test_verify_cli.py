"""``bitwright verify`` and ``compare`` on files that exist already, and targets that no runtime here executes."""

import json
from xml.etree import ElementTree

import pytest
import torch

import bitwright as bw
from bitwright.cli.load import load_module
from tests.cli.conftest import QUANTIZE

VERIFY = ["verify", "out", "--data", "nets:calibration", "--runtime", "onnxruntime", "--no-latency"]


@pytest.fixture
def exported(here):
    """A model, its file and its folder, as a user has left them."""
    nets = load_module("nets", "the model")
    torch.manual_seed(0)
    data = [batch[0] if isinstance(batch, tuple | list) else batch for batch in nets.calibration()]
    model = bw.calibrate(bw.prepare(nets.build(), data[0]), data, progress=False)
    bw.save(model, here / "saved")
    return bw.export(model, here / "out" / "model.onnx").path


def test_verify_judges_a_file_alone(run, here, exported):
    code, out, _ = run(*VERIFY, "--json", "--max-output-difference", "0.5", "--min-coverage", "0.5")
    data = json.loads(out)
    assert (code, data["ok"], data["missed"]) == (0, True, [])
    assert data["runtimes"]["onnxruntime"]["coverage"] == 0.8
    assert "not with the model" in data["notes"][0]
    code, out, _ = run(*VERIFY, "--junit", "found.xml")
    assert code == 0
    assert "compared, not judged, in onnxruntime" in out
    suite = ElementTree.parse(here / "found.xml").getroot()
    assert (suite.get("tests"), suite.get("skipped"), suite[0][0].tag) == ("1", "1", "skipped")
    code, out, _ = run(*VERIFY, "--min-coverage", "1", "--junit", "found.xml")
    assert code == 1
    assert "NOT verified in onnxruntime" in out
    suite = ElementTree.parse(here / "found.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert "80.0% of the executed operators run in integers" in suite[0][0].get("message")


def test_verify_proves_a_file_of_a_saved_model(run, here, exported):
    known = ["--model", "nets:build", "--saved", "saved", "--eval", "nets:evaluate", "--max-accuracy-drop", "0.5"]
    code, out, _ = run(*VERIFY, *known, "--json")
    data = json.loads(out)
    assert (code, data["ok"]) == (0, True)
    assert data["runtimes"]["onnxruntime"]["largest"] <= 1
    assert set(data["scores"]) == {"FP32", "onnxruntime"}


def test_compare_two_files(run, refused, here, exported):
    (here / "other.onnx").write_bytes(exported.read_bytes())
    command = ["compare", "out", "other.onnx", "--data", "nets:calibration"]
    code, out, _ = run(*command, "--json", "--max-output-difference", "0")
    assert (code, json.loads(out)["largest"]) == (0, 0.0)
    assert "differs by at most 0.000%" in run(*command)[1]
    scored = ["--eval", "nets:evaluate", "--max-accuracy-drop", "0", "--min-coverage", "1", "--junit", "both.xml"]
    code, out, _ = run(*command, *scored)
    assert code == 1  # one of five operators is float, and the accuracy is the same
    assert "Missed: onnxruntime: 80.0% of the executed operators run in integers, less than 100.0%" in out
    assert out.count("agreement") == 2
    suite = ElementTree.parse(here / "both.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    code, out, _ = run(*command, "--eval", "nets:evaluate", "--max-accuracy-drop", "0", "--json")
    assert (code, json.loads(out)["missed"]) == (0, [])
    assert "--max-accuracy-drop needs --eval" in refused(*command, "--max-accuracy-drop", "0.1")


def test_accuracy_alone_judges_a_file(run, here, exported):
    """The limit on the drop is enough for a verdict, in both directions."""
    scored = [*VERIFY, "--eval", "nets:evaluate", "--json", "--max-accuracy-drop"]
    code, out, _ = run(*scored, "1")
    assert (code, json.loads(out)["ok"]) == (0, True)
    worse = [*VERIFY, "--eval", "nets:evaluate_falling", "--json", "--max-accuracy-drop", "0.1"]
    code, out, _ = run(*worse)
    data = json.loads(out)
    assert (code, data["ok"]) == (1, False)
    assert data["missed"] == ["onnxruntime: score drops by 0.5 (from 1 to 0.5), more than 0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nets:build"], "--model and --saved go together"),
        (["--min-speedup", "1"], "--min-speedup needs the speed to be measured"),
        (["--max-accuracy-drop", "0.1"], "--max-accuracy-drop needs --eval"),
        ([], "the folder 'out' must have one file to run; it has none"),
    ],
)
def test_verify_refuses(refused, here, arguments, message):
    (here / "out").mkdir()
    assert message in refused(*VERIFY, *arguments)


def test_target_without_a_runtime_is_proven_by_reference(run, here):
    code, out, _ = run(*QUANTIZE, "--backend", "vitis", "--json")
    data = json.loads(out)
    assert (code, data["ok"], data["missed"]) == (0, True, [])
    found = data["proof"]["runtimes"]["reference"]
    assert (found["coverage"], found["latency"], found["largest"]) == (None, None, 0)
    assert data["proof"]["notes"] == [
        "5 of the 5 constraints published for vitis are kept; this leaves unproven the kernels of vitis itself, and "
        "what its tools may demand beyond these",
        "nothing here executes files for vitis: all quantized tensors and outputs were compared in onnxruntime, which "
        "ran every quantizer as a separate operator",
    ]
    assert {v["constraint"] for v in data["proof"]["violations"]} == {"vitis-operands"}
    page = (here / "out" / "report.html").read_text()
    assert "What vitis demands of files" in page


def test_verify_checks_what_a_target_demands(run, refused, here, exported):
    """A file for onnxruntime has zero points: TensorRT has none."""
    code, out, _ = run(*VERIFY, "--backend", "tensorrt", "--json", "--junit", "found.xml")
    data = json.loads(out)
    assert (code, data["ok"]) == (1, False)
    assert {v["constraint"] for v in data["violations"] if not v["advice"]} >= {"tensorrt-symmetric", "tensorrt-types"}
    cases = {case.get("name"): len(case) for case in ElementTree.parse(here / "found.xml").getroot()}
    assert (cases["tensorrt-symmetric"], cases["tensorrt-opset"], cases["onnxruntime"]) == (1, 0, 0)
    assert "leave out --backend" in refused(
        *VERIFY, "--backend", "tensorrt", "--model", "nets:build", "--saved", "saved"
    )


def test_no_verify_writes_and_does_not_run(run, refused, here):
    assert "leave out --no-verify" in refused(*QUANTIZE, "--no-verify", "--min-coverage", "1")
    code, out, _ = run(*QUANTIZE, "--no-verify")
    assert code == 0
    assert "Written, not verified" in out
    assert (here / "out" / "model.onnx").exists()
