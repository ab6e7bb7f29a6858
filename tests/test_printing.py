"""Results print themselves: as tables and words, at a prompt as with print, and in a few lines."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.columns import in_columns

WIDEST = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GELU()).eval()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    model = bw.calibrate(bw.prepare(net, batches[0], recipe="W4A8"), batches)
    path = tmp_path_factory.mktemp("printing") / "net.onnx"
    results = {"ledger": bw.ledger_of(model), "plan": bw.plan(net, "W4A8", batches[0])}
    results["explanation"] = bw.explain_capture(net, batches[0])
    results["analysis"] = bw.analyze(model, batches)
    results["file"] = bw.export(model, path)
    results["proof"] = bw.verify(model, path, batches, latency=False)
    results["runtime"] = results["proof"].runtimes["onnxruntime"]
    results["sensitivity"] = bw.sensitivity(model, batches)
    results["corrections"] = bw.correct(model, batches)
    results["correction"] = results["corrections"][0]
    results["search"] = bw.search_bits(model, batches, {"size": 400})
    results["reconstruction"] = bw.reconstruct(model, batches, steps=1)
    return results


WORDS = {
    "ledger": "onnxruntime: 2 integer, 2 fused, 1 float",
    "plan": "onnxruntime: 2 integer, 2 fused, 1 float",
    "explanation": "1 graph with",
    "analysis": "output SQNR",
    "file": "net.onnx",
    "proof": "verified in onnxruntime",
    "runtime": "4 (gelu, runs as",
    "sensitivity": "kl alone",
    "corrections": "correct_bias: 2 layers changed",
    "correction": "equalize: 0 layers changed",
    "search": "bit operations",
    "reconstruction": "qdrop: ",
}


@pytest.mark.parametrize("name", WORDS)
def test_results(found, name):
    for text in (str(found[name]), repr(found[name])):
        assert WORDS[name] in text
        assert len(text.splitlines()) <= 20
        assert max(map(len, text.splitlines())) < WIDEST
        assert "tensor([" not in text


def test_every_operator_has_a_line(found):
    lines = str(found["analysis"]).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "input", "0", "1", "2", "3", "4"]
    assert isinstance(found["analysis"], list)


def test_columns():
    rows = [("0", "1.5", "", "a"), ("stem", "20", "", "")]
    assert in_columns(("name", "n", "none", "why"), rows) == ["name    n  why", "0     1.5  a", "stem   20"]
    assert in_columns(("name", "n"), []) == ["name"]
    assert in_columns(("name", "n"), [], 2) == ["name  n"]
