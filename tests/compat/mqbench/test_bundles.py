"""What ``convert_deploy`` writes besides Q/DQ: the float model and its ranges under MQBench's names."""

import json
import logging

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.compat.mqbench.convert_deploy import convert_deploy
from bitwright.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform
from bitwright.compat.mqbench.utils.logger import logger
from bitwright.compat.mqbench.utils.state import enable_calibration, enable_quantization
from bitwright.quantizer import quantizers

CLIPPED = ("net_deploy_model.onnx", "net_clip_ranges.json")
NAMES = {
    **dict.fromkeys(("SNPE", "PPLW8A16", "Vitis"), CLIPPED),
    "NNIE": ("net_deploy_model.onnx", "net_gfpq_param_dict.json"),
    "Tengine_u8": ("net_for_tengine.onnx", "net_for_tengine.scale"),
    "STPU": ("net_for_stpu.onnx", "net_stpu_minmax.json"),
}


def deployed(backend, folder, spoil=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()
    x = torch.randn(4, 3, 8, 8)
    model = prepare_by_platform(net, BackendType[backend])
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    if spoil:
        with torch.no_grad():
            model.get_submodule("0").weight_quantizer.method.scale.mul_(1.7)
    return (
        net,
        model,
        x,
        convert_deploy(model, BackendType[backend], dummy_input=x, output_path=folder, model_name="net"),
    )


@pytest.mark.parametrize("backend", NAMES)
def test_the_files_of_a_target(backend, tmp_path):
    net, model, x, path = deployed(backend, tmp_path)
    clean, ranges = (tmp_path / name for name in NAMES[backend])
    assert path == tmp_path / "net.onnx"
    kinds = {node.op_type for node in onnx.load(str(clean)).graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear"}
    session = onnxruntime.InferenceSession(str(clean))
    got = torch.tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert torch.allclose(got, net(x), atol=0.1 if backend == "NNIE" else 0.05)
    assert ranges.stat().st_size > 20
    beside = [file for file in tmp_path.iterdir() if file.name.startswith(clean.stem) and file != clean]
    assert ranges.read_bytes() in [file.read_bytes() for file in beside]
    assert backend not in ("SNPE", "NNIE") or bw.verify(model, clean, [x], latency=False).ok


def test_the_numbers_are_those_of_the_quantizers(tmp_path):
    _, model, x, _ = deployed("Tensorrt", tmp_path)
    said = json.loads((tmp_path / CLIPPED[1]).read_text())["tensorrt"]["blob_range"]
    limits = [float(q.qparams()[0]) * 127 for name, q in quantizers(model).items() if "weight" not in name]
    assert len(said) == 4  # what the layers read, and what is flattened
    assert all(any(value == pytest.approx(limit, rel=1e-6) for limit in limits) for value in said.values())
    assert max(said.values()) >= float(x.abs().max()) * 0.999


def test_what_a_format_cannot_say_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        *_, path = deployed("Tensorrt", tmp_path, spoil=True)
    assert path.exists()
    assert not (tmp_path / CLIPPED[0]).exists()
    assert "net_deploy_model.onnx is not written: TensorRT uses the largest magnitude over 127" in caplog.text
