"""Sparsebit's QuantModel: calibrate, train, find errors of layers, export."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.compat.sparsebit import QuantModel, parse_qconfig, to_recipe
from bitwright.errors import CalibrationError, ConfigError
from bitwright.quantizer import Mode, quantizers
from tests.compat.sparsebit.nets import YAML, config, first_input


@pytest.mark.parametrize("lazy", [True, False])
def test_the_flow(model, x, lazy, tmp_path):
    path = tmp_path / "qconfig.yaml"
    path.write_text(YAML)
    qmodel = QuantModel(model, parse_qconfig(path), *([] if lazy else [x]))
    qmodel.prepare_calibration()
    for batch in (x, 1.5 * x):
        assert torch.equal(qmodel(batch), model(batch))
    qmodel.calc_qparams()
    assert torch.equal(qmodel(x), model(x))
    qmodel.set_quant(w_quant=True, a_quant=True)
    reference = bw.calibrate(bw.prepare(model, x, recipe=to_recipe(path)[0]), [x, 1.5 * x])
    assert torch.equal(qmodel(x), reference(x))
    assert not torch.equal(qmodel(x), model(x))
    qmodel.set_quant(w_quant=True)
    assert {q.mode for n, q in quantizers(qmodel).items() if n.endswith("_weight_quantizer")} == {Mode.QUANTIZE}
    assert first_input(qmodel.model).mode is Mode.OFF
    qmodel.set_quant(a_quant=True)
    assert first_input(qmodel.model).mode is Mode.QUANTIZE
    assert qmodel.model.fc.weight_quantizer.mode is Mode.OFF


def test_training(model, x):
    qmodel = QuantModel(model, config(W__QUANTIZER__TYPE="LSQ", A__QUANTIZER__TYPE="lsq"))
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.train()
    optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01)
    target = torch.randn(4, 5)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(qmodel(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert qmodel.model.fc.weight_quantizer.method.scale.grad.abs().sum() > 0


def test_calibrating_on_quantized_inputs(model, x):
    low = {"W__QUANTIZER__BIT": 2, "A__QUANTIZER__BIT": 2}
    scales = {}
    for asym in (False, True):
        qmodel = QuantModel(model, config(**low))
        qmodel.prepare_calibration()
        qmodel(x)
        qmodel(2 * x)
        qmodel.calc_qparams(asym=asym)
        qmodel.set_quant(True, True)
        scales[asym] = {
            n: q.scale for n, q in quantizers(qmodel.model).items() if n.startswith("bitwright.quantizers.")
        }
    names = list(scales[True])
    assert torch.equal(scales[True][names[0]], scales[False][names[0]])  # nothing before it
    assert any(not torch.equal(scales[True][n], scales[False][n]) for n in names[1:])
    # The last range is that of the values that come in when all before is quantized.
    last = qmodel.model.fc.input_quantizer
    seen = []
    last.quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for batch in (x, 2 * x):
        qmodel(batch)
    values = torch.cat(seen)
    spread = (values.max().clamp(min=0) - values.min().clamp(max=0)) / 3
    assert torch.allclose(last.scale, spread, rtol=1e-5)
    alone = QuantModel(model, config(**low))
    alone.prepare_calibration()
    alone(x)
    alone(2 * x)
    alone.calc_qparams(asym=True, w_quant=False, a_quant=False)
    found = {n: q.scale for n, q in quantizers(alone.model).items() if n.startswith("bitwright.quantizers.")}
    assert all(torch.equal(found[n], s) for n, s in scales[False].items())


def test_errors_of_layers(model, x):
    qmodel = QuantModel(model, config(A__QUANTIZER__BIT=4), x)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    modes = {n: q.mode for n, q in quantizers(qmodel).items()}
    alone = qmodel.get_quantization_error(x)
    together = qmodel.get_quantization_error(x, is_async=False)
    assert {n: q.mode for n, q in quantizers(qmodel).items()} == modes
    assert list(alone)[:2] == ["first", "blocks.0.conv"]
    assert torch.equal(alone["first"], together["first"])  # its input is the model's
    fc = qmodel.model.fc
    with torch.no_grad():
        seen = {}
        handle = fc.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        qmodel(x)
        handle.remove()
        fc.input_quantizer.quantizer.quantize(), fc.weight_quantizer.quantize()
        want = F.mse_loss(fc(fc.input_quantizer.quantizer(seen["x"])), model(x))
    assert torch.allclose(alone["fc"], want)
    qmodel.set_quant(True, True)
    assert torch.allclose(together["fc"], F.mse_loss(qmodel(x), model(x)))
    assert qmodel.get_quantization_error(x, checker=lambda a, b: "mine")["fc"] == "mine"


def test_export(model, x, tmp_path):
    pytest.importorskip("onnxruntime")
    qmodel = QuantModel(model, config(BACKEND="onnxruntime", A__QADD__ENABLE_QUANT=True, W__QUANTIZER__BIT=7))
    with pytest.raises(CalibrationError, match=r"has no range yet"):
        qmodel.export_onnx(x, tmp_path / "q.onnx")
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    for axes, batch in ((None, 4), ({"x": {0: "batch"}}, 3)):
        path = qmodel.export_onnx(x, tmp_path / "q.onnx", dynamic_axes=axes)
        out = bw.run_file(path)(x[:batch])
        assert (out - qmodel(x[:batch])).abs().max() < 0.05 * qmodel(x).abs().max()
    path = qmodel.export_onnx(x, tmp_path / "named.onnx", input_names=["image"], output_names=["score"])
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert torch.equal(
        torch.from_numpy(session.run(["score"], {"image": x.numpy()})[0]), bw.run_file(tmp_path / "q.onnx")(x)
    )
    with pytest.raises(ConfigError, match=r"input_names has 2 names, and the model has 1 input"):
        qmodel.export_onnx(x, path, input_names=["a", "b"])
    with pytest.raises(ConfigError, match=r"opset_version must be at most 21, not 22"):
        qmodel.export_onnx(x, tmp_path / "q.onnx", opset_version=22)


def test_a_model_that_is_no_graph_cannot_be_run_node_by_node(x):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x) if x.sum().item() > -1e9 else x

    qmodel = QuantModel(Asks(), YAML, x)
    qmodel.prepare_calibration()
    qmodel(x)
    with pytest.raises(ConfigError, match=r"Asks runs as it is written, not as one graph"):
        qmodel.calc_qparams(asym=True)
