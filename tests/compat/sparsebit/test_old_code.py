"""Scripts in the style of Sparsebit's README and examples, under its package layout."""

import operator

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.compat.sparsebit.quantization import QuantModel, parse_qconfig
from bitwright.compat.sparsebit.quantization.converters import fuse_operations, simplifiers
from bitwright.compat.sparsebit.quantization.modules import QConv2d, QuantOpr, register_qmodule
from bitwright.compat.sparsebit.quantization.observers import BaseObserver, register_observer
from bitwright.compat.sparsebit.quantization.quant_config import _C
from bitwright.compat.sparsebit.quantization.quantizers import Quantizer, register_quantizer
from bitwright.compat.sparsebit.quantization.tools.errors_profiler import QuantizationErrorProfiler
from bitwright.errors import ConfigError
from bitwright.nn.registry import unregister_qmodule
from bitwright.quantizer import quantizers
from bitwright.spec import PerTensor
from tests.compat.sparsebit.nets import YAML, verdicts


def test_the_config_node(tmp_path):
    cfg = _C.clone()
    cfg.freeze()
    for change in (lambda: setattr(cfg.W.QUANTIZER, "BIT", 4), lambda: cfg.merge_from_list(["W.QUANTIZER.BIT", 4])):
        with pytest.raises(AttributeError, match="the config is frozen; defrost"):
            change()
    cfg.defrost()
    (tmp_path / "q.yaml").write_text(YAML)
    cfg.merge_from_file(tmp_path / "q.yaml")
    cfg.merge_from_list(["W.QUANTIZER.BIT", 4, "BACKEND", "virtual"])
    assert (cfg.W.QUANTIZER.BIT, cfg.A.QUANTIZER.BIT, cfg.SCHEDULE.FUSE_BN) == (4, 8, True)
    assert (_C.W.QUANTIZER.BIT, _C.SCHEDULE.FUSE_BN) == (-1, False)
    with pytest.raises(ConfigError, match="has no key 'BITS': did you mean 'BIT'"):
        cfg.merge_from_list(["W.QUANTIZER.BITS", 4])
    with pytest.raises(ConfigError, match="alternating keys and values"):
        cfg.merge_from_list(["BACKEND"])


def test_quantization_aware_training(model, x, tmp_path):
    cfg = parse_qconfig(YAML)
    cfg.W.QUANTIZER.TYPE = cfg.A.QUANTIZER.TYPE = "lsq"
    cfg.W.QUANTIZER.BIT = cfg.A.QUANTIZER.BIT = 4
    qmodel = QuantModel(model, cfg)
    qmodel.model.first.weight_quantizer.set_bit(bit=8)  # before any data has been seen
    qmodel.model.fc.input_quantizer.set_bit(bit=8)
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.05)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    assert isinstance(qmodel.model.first, QConv2d)
    assert (qmodel.model.first.weight_quantizer.num_bits, qmodel.model.fc.weight_quantizer.num_bits) == (8, 4)
    labels, losses = torch.randint(5, (4,)), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(qmodel(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    qmodel.eval()
    path = qmodel.export_onnx(x, name=tmp_path / "q.onnx", extra_info=True)
    got = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0]
    assert abs(torch.tensor(got) - qmodel(x)).max() <= 0.05 * float(qmodel(x).abs().max())
    extra = onnx.load(str(tmp_path / "q_extra.onnx"))
    onnx.checker.check_model(extra, full_check=True)
    bits = {p.value for node in extra.graph.node for p in node.metadata_props if p.key == "bits"}
    assert bits == {"4", "8"}
    assert onnxruntime.InferenceSession(str(tmp_path / "q_extra.onnx")).get_inputs()[0].name == "x"


def test_exporting_right_after_calc_qparams(model, x, tmp_path):
    qmodel = QuantModel(model, parse_qconfig(YAML))
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    path = qmodel.export_onnx(x, name=tmp_path / "q.onnx")
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(str(path)).graph.node)
    assert torch.equal(qmodel(x), model(x))  # as before: nothing is quantized yet


def test_batchnorm_tuning(model, x):
    qmodel = QuantModel(model, parse_qconfig(YAML))
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.eval()
    norm = qmodel.model.blocks[0].norm1
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with qmodel.batchnorm_tuning():
        qmodel(x)
        qmodel(2 * x)
    means = torch.stack([batch.mean((0, 2, 3)) for batch in seen])
    assert torch.allclose(norm.running_mean, means.mean(0), atol=1e-6)
    assert norm.momentum == 0.1
    assert not norm.training
    tuned = norm.running_mean.clone()
    qmodel.train()(x)
    assert torch.equal(norm.running_mean, tuned)


def test_ones_own_observer_and_quantizer(model, x, own_plugins):
    @register_observer
    class Half(BaseObserver):
        TYPE = "HALF"

        def observe(self, values):
            self.top = values.abs().max() / 2

        def range(self):
            return -self.top, self.top

        def merge(self, other):
            self.top = other.top

    @register_quantizer
    class Floors(Quantizer):
        TYPE = "Floors"

        def forward(self, values, scale, zero_point):
            return torch.floor(values / scale) * scale

    cfg = parse_qconfig(YAML)
    cfg.A.OBSERVER.TYPE, cfg.W.QUANTIZER.TYPE = "half", "floors"
    cfg.W.QSCHEME = "per-tensor-symmetric"
    qmodel = QuantModel(model, cfg)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    first = quantizers(qmodel.model)["bitwright.quantizers.x"]
    assert torch.allclose(first.range()[1], x.abs().max() / 2, rtol=0.02)
    weight, quantizer = qmodel.model.first.weight, qmodel.model.first.weight_quantizer
    assert torch.equal(quantizer(weight), torch.floor(weight / quantizer.scale) * quantizer.scale)
    assert isinstance(first.spec.granularity, PerTensor)
    with pytest.raises(ConfigError, match="needs TYPE = 'its name'"):
        register_observer(BaseObserver)
    with pytest.raises(ConfigError, match="a quantizer must be a class derived from Method, not 3"):
        register_quantizer(3)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x * x)


def test_ones_own_module_for_a_product_is_used_on_virtual(x):
    left = QuantModel(Product(), parse_qconfig(YAML)).model
    assert verdicts(left)["mul"] == "float"

    @register_qmodule(sources=[operator.mul, torch.mul], override=True)
    class QMul(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()

        def forward(self, x_left, x_right):
            return self.input_quantizer(x_left) * self.input_quantizer(x_right)

    try:
        made = QuantModel(Product(), parse_qconfig(YAML)).model
        assert any(isinstance(module, QMul) for module in made.modules())
    finally:
        unregister_qmodule(QMul)


def test_schedules_and_profiler(model, x):
    assert "fold_batchnorm" in fuse_operations.lists.fuse_list
    assert "remove_identity" in simplifiers.lists.lists
    qmodel = QuantModel(model, parse_qconfig(YAML))
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    errors = QuantizationErrorProfiler(qmodel.model).apply(x, F.mse_loss, is_async=True)
    assert errors == qmodel.get_quantization_error(x) == QuantizationErrorProfiler(qmodel).apply(x)
    assert all(float(error) > 0 for error in errors.values())


def test_pruning_is_refused():
    with pytest.raises(ImportError, match=r"sparse has no SparseModel: Bitwright quantizes and does not prune"):
        from bitwright.compat.sparsebit.sparse import SparseModel  # noqa: F401
