"""The zoo: every net is captured with exact parity at any batch and size, and quantizes end to end."""

import dataclasses
import re

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import CaptureError
from bitwright.graph import capture_model
from bitwright.preparation import Verdict
from bitwright.quantizer import quantizers
from tests.graph.capture.capturing import same
from tests.zoo import ZOO

ISLANDS = {"PackedTagger": {"encoder"}}
LAYERS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


def built(name):
    torch.manual_seed(0)
    model = ZOO[name].build().eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return model


def tensors(item):
    """The float tensors in a result of any nesting."""
    if isinstance(item, torch.Tensor):
        return [item] if item.is_floating_point() else []
    if isinstance(item, dict):
        return [t for value in item.values() for t in tensors(value)]
    if dataclasses.is_dataclass(item):
        return tensors(vars(item))
    return [t for value in item for t in tensors(value)] if isinstance(item, tuple | list) else []


@pytest.mark.parametrize("name", ZOO)
def test_captured_with_exact_parity(name):
    case, model = ZOO[name], built(name)
    captured = capture_model(model, case.inputs(2, case.size))
    assert set(captured.islands) == ISLANDS.get(name, set())
    sizes = [(2, case.size), (3, case.size), (1, case.size)]
    sizes += [(2, case.other), (3, case.other)] if case.other else []
    with torch.no_grad():
        for size in sizes:
            inputs = case.inputs(*size)
            expected, got = case.call(model, inputs), case.call(captured.model, inputs)
            assert type(got) is type(expected)
            assert same(got, expected), f"differs at batch and size {size}"


@pytest.mark.parametrize("name", ZOO)
def test_quantizes_end_to_end(name):
    case, model = ZOO[name], built(name)
    quantized = bw.prepare(model, case.inputs(2, case.size), debug=True)
    bw.calibrate(quantized, [case.inputs(4, size) for size in (case.size, case.size, case.other or case.size)])
    assert all(q.calibrated for q in quantizers(quantized).values())
    with torch.no_grad():
        for size in [(3, case.size), *([(2, case.other)] if case.other else [])]:
            inputs = case.inputs(*size)
            expected, got = tensors(case.call(model, inputs)), tensors(case.call(quantized, inputs))
            assert len(got) == len(expected) > 0
            for a, b in zip(got, expected, strict=True):
                assert torch.isfinite(a).all()
                assert float((a - b).pow(2).mean()) < 0.1 * float(b.pow(2).mean()) + 1e-4


@pytest.mark.parametrize("name", ZOO)
def test_every_layer_is_quantized(name):
    case, model = ZOO[name], built(name)
    entries = {e.name: e for e in bw.ledger_of(bw.prepare(model, case.inputs(2, case.size))).entries}
    inside = {f"{n}.out_proj" for n, a in model.named_modules() if isinstance(a, nn.MultiheadAttention)}
    layers = {n for n, m in model.named_modules() if isinstance(m, LAYERS)} - inside
    missing = {n: entries[n].reason if n in entries else "not in the ledger" for n in layers}
    missing = {n: why for n, why in missing.items() if n not in entries or entries[n].verdict is not Verdict.INTEGER}
    assert not {n for n in missing if not _is_idle(model, n)}, missing


def _is_idle(model, name):
    """Heads that are for training only."""
    return name == "aux" and type(model).__name__ == "Inception"


@pytest.mark.parametrize("name", ZOO)
def test_a_training_step_gives_gradients(name):
    case, model = ZOO[name], built(name)
    quantized = bw.prepare(model, case.inputs(2, case.size), debug=True)
    bw.calibrate(quantized, [case.inputs(2, case.size)])
    loss = sum(t.pow(2).mean() for t in tensors(case.call(quantized, case.inputs(2, case.size))))
    loss.backward()
    plain = built(name)
    sum(t.pow(2).mean() for t in tensors(case.call(plain, case.inputs(2, case.size)))).backward()
    names = [n for n, p in plain.named_parameters() if p.grad is not None]
    expected = {re.sub(r"parametrizations\.(\w+)\.original\d?", r"\1", n) for n in names}  # computed once
    got = {n for n, p in quantized.named_parameters() if p.grad is not None}
    assert expected <= got | {n.replace(".weight", ".bias") for n in got}
    assert all(torch.isfinite(p.grad).all() for p in quantized.parameters() if p.grad is not None)


def test_a_length_that_is_part_of_the_graph_is_refused():
    case, model = ZOO["Mamba"], built("Mamba")
    captured = capture_model(model, case.inputs(2, 6)).model
    with pytest.raises(CaptureError, match=r"an index at .*sequences.py:\d+ gives 7, and gave 6"):
        case.call(captured, case.inputs(2, 7))


def test_a_captured_decoder_generates():
    model = built("Gpt")
    quantized = bw.prepare(model, {"input_ids": torch.randint(0, 50, (2, 4))})
    ids = torch.randint(0, 50, (2, 3))
    assert torch.equal(quantized.generate(ids, 6), model.generate(ids, 6))
    assert quantized.lm_head.weight is quantized.wte.weight
    bw.calibrate(quantized, [{"input_ids": torch.randint(0, 50, (4, 8))}])
    assert quantized.generate(ids, 6).shape == (2, 9)


@pytest.mark.parametrize("name", ["ShuffleNet", "Yolo", "Bert"])
def test_exports_and_verifies(name, tmp_path):
    case, model = ZOO[name], built(name)
    quantized = bw.prepare(model, case.inputs(2, case.size), debug=True)
    batches = [case.inputs(4, case.size) for _ in range(2)]
    bw.calibrate(quantized, batches)
    file = bw.export(quantized, tmp_path / "net.onnx")
    proof = bw.verify(quantized, file, [case.inputs(2, case.size)], runtimes=["onnxruntime"], latency=False)
    found = proof.runtimes["onnxruntime"]
    assert found.equal > 0.98
    assert any(operator.integer for operator in found.operators)
