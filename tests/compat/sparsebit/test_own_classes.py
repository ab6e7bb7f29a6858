"""Observers and quantizers written for Sparsebit, and every path that it imports from."""

import importlib

import onnxruntime
import pytest
import torch
from bitwright.compat.sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor
from bitwright.compat.sparsebit.quantization.quantizers.quant_tensor import STE

from bitwright.compat.refused import RefusedNameError
from bitwright.compat.sparsebit.quantization import QuantModel, parse_qconfig
from bitwright.compat.sparsebit.quantization.common import Granularity, get_backend, get_qscheme
from bitwright.compat.sparsebit.quantization.observers import Observer as BaseObserver
from bitwright.compat.sparsebit.quantization.observers import register_observer
from bitwright.compat.sparsebit.quantization.quantizers import Quantizer as BaseQuantizer
from bitwright.compat.sparsebit.quantization.quantizers import register_quantizer
from bitwright.errors import ConfigError
from bitwright.methods import METHODS
from bitwright.quantizer import quantizers
from tests.compat.sparsebit.nets import YAML

pytestmark = pytest.mark.usefixtures("own_plugins")
ROOT = "bitwright.compat.sparsebit.quantization"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("modules.conv", "QConv2d QConvTranspose2d"),
        ("modules.math", "QAdd QMul QSubtract QDivide QMean"),
        ("modules.activations", "QReLU QHardSigmoid QSoftmax"),
        ("modules.shape", "Concat Flatten Reshape Permute"),
        ("observers.kl_histogram", "KLHistogramObserver"),
        ("observers.moving_average", "MovingAverageObserver"),
        ("quantizers.lsq_plus", "LSQ_plus"),
        ("quantizers.base", "Quantizer"),
        ("converters.utils.subgraph_matching_node", "MatchingNode InputMatchingType"),
    ],
)
def test_old_paths(path, names):
    module = importlib.import_module(f"{ROOT}.{path}")
    package, _, last = f"{ROOT}.{path}".rpartition(".")
    assert getattr(importlib.import_module(package), last) is module
    for name in names.split():
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        _ = module.NoSuchName


def test_what_is_gone_says_what_to_do():
    for path, name, said in (
        ("modules.base", "MultipleInputsQuantOpr", "call self.input_quantizer on each tensor"),
        ("modules.unary", "Clone", r"match torch\.Tensor\.clone"),
        ("converters.prune", "PruneGraph", "removed after each rewrite"),
    ):
        with pytest.raises(RefusedNameError, match=said):
            getattr(importlib.import_module(f"{ROOT}.{path}"), name)


def test_names_of_configs():
    assert get_backend("tensorrt").value == 2
    assert get_qscheme("per-channel-affine") is torch.per_channel_affine
    with pytest.raises(TypeError, match="did you mean 'tensorrt'"):
        get_backend("tensorrtt")
    with pytest.raises(TypeError, match="unknown scheme 'per-row-affine'"):
        get_qscheme("per-row-affine")


def test_an_observer_and_a_quantizer_as_they_were_written(model, x, tmp_path):
    @register_observer
    class Observer(BaseObserver):
        TYPE = "shrunk"

        def __init__(self, config, qdesc):
            super().__init__(config, qdesc)
            self.alpha = config.OBSERVER.PERCENTILE.ALPHA

        def calc_minmax(self):
            grain = Granularity.CHANNELWISE if self.is_perchannel else Granularity.LAYERWISE
            data = self.data_cache.get_data_for_calibration(grain)
            self.data_cache.reset()
            self.max_val = (data.amax(1) if self.is_perchannel else data.max()) * self.alpha
            self.min_val = (data.amin(1) if self.is_perchannel else data.min()) * self.alpha
            return self.min_val, self.max_val

    @register_quantizer
    class Quantizer(BaseQuantizer):
        TYPE = "straight"

        def __init__(self, config):
            super().__init__(config)
            self.bits_asked = config.QUANTIZER.BIT

        def _forward(self, x, scale, zero_point):
            return STE.apply(x, scale, zero_point, self.qdesc, self.backend)

    cfg = parse_qconfig(YAML)
    for part in (cfg.W, cfg.A):
        part.OBSERVER.TYPE, part.QUANTIZER.TYPE, part.OBSERVER.PERCENTILE.ALPHA = "SHRUNK", "Straight", 0.5
    qmodel = QuantModel(model, cfg, x)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel(2 * x)
    qmodel.init_QAT()
    seen = quantizers(qmodel.model)["bitwright.quantizers.x"]
    lo, hi = float(x.min()), float(x.max())  # the second batch is twice as wide, and the range half of it
    scale = (hi - lo) / 255
    assert float(seen.scale) == pytest.approx(scale, rel=1e-6)
    first = qmodel.model.first
    weight = first.weight.detach()
    steps = weight.flatten(1).abs().amax(1) / 2 / 127
    assert torch.allclose(first.weight_quantizer.scale, steps, rtol=1e-6)
    assert first.weight_quantizer.method.bits_asked == 8
    spread = steps.reshape(-1, 1, 1, 1)
    want = (weight / spread).round().clamp(-128, 127) * spread
    assert torch.allclose(first.weight_quantizer(weight), want, atol=1e-7)
    qmodel(x).square().sum().backward()
    assert float(first.weight.grad.abs().max()) > 0
    path = qmodel.eval().export_onnx(x, name=tmp_path / "q.onnx")
    got = torch.tensor(onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0])
    want = qmodel(x).detach()
    assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())


def test_an_observer_as_the_documentation_prints_it(model, x):
    @register_observer
    class Observer(BaseObserver):
        TYPE = "documented"

        def __init__(self, config, qdesc):
            super(Observer, self).__init__(config, qdesc)  # noqa: UP008

        def calc_minmax(self):
            assert len(self.data_cache) > 0
            data = torch.cat(self.data_cache, axis=1)
            self.reset_data_cache()
            assert len(self.data_cache) == 0
            self.min_val, self.max_val = data.amin(1) / 2, data.amax(1) / 2
            return self.min_val, self.max_val

    cfg = parse_qconfig(YAML)
    cfg.W.OBSERVER.TYPE = cfg.A.OBSERVER.TYPE = "documented"
    qmodel = QuantModel(model, cfg, x)
    qmodel.prepare_calibration()
    for batch in (x, 2 * x):
        qmodel(batch)
    qmodel.calc_qparams()
    seen = quantizers(qmodel.model)["bitwright.quantizers.x"]
    assert float(seen.scale) == pytest.approx(float(x.max() - x.min()) / 255, rel=1e-6)
    steps = model.first.weight.detach().flatten(1).abs().amax(1) / 2 / 127
    assert torch.allclose(qmodel.model.first.weight_quantizer.scale, steps, rtol=1e-6)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"calc_qparams": lambda self: (self.scale, self.zero_point)}, "calc_qparams would not be called: an observer"),
        ({"_qparams_preprocess": lambda self, x: None}, "_qparams_preprocess would not be called"),
        ({"_forward": lambda self, x: x}, "_forward takes x, scale and zero_point: too many positional arguments"),
    ],
)
def test_what_would_not_be_called_is_refused(members, said):
    known = METHODS.names()
    with pytest.raises(ConfigError, match=f"Mine.{said}"):
        register_quantizer(type("Mine", (BaseQuantizer,), {"TYPE": "mine", **members}))
    with pytest.raises(ConfigError, match=r"Own.update would not be called: .* ranges in calc_minmax"):
        register_observer(type("Own", (BaseObserver,), {"TYPE": "own", "update": lambda self, x: None}))
    assert METHODS.names() == known


def test_registered_classes_can_be_derived_from():
    @register_observer
    class First(BaseObserver):
        TYPE = "first"

        def __init__(self, config, qdesc):
            super().__init__(config, qdesc)
            self.note = "first"

        def calc_minmax(self):
            data = self.get_calibration_data(c_first=True)
            return data.amin(1), data.amax(1)

    @register_observer
    class Second(First):
        TYPE = "second"

        def __init__(self, config, qdesc):
            super().__init__(config, qdesc)
            self.note += " and second"

    spec = QuantDescriptor(parse_qconfig(YAML).A).spec
    observer = Second(spec)
    observer(torch.tensor([[1.0, -2.0]]))
    observer(torch.tensor([[3.0, 0.0]]))
    assert observer.note == "first and second"
    assert [float(end) for end in observer.range()] == [-2, 3] == [float(end) for end in observer.range()]
    other = Second(spec)
    other(torch.tensor([[-7.0]]))
    other.merge(Second(spec))
    assert [float(end) for end in other.range()] == [-7, -7]


def test_gradients_of_ste():
    qdesc = QuantDescriptor(parse_qconfig(YAML).A)
    x = torch.tensor([-1.0, 0.13, 0.27, 40.0], requires_grad=True)
    scale, zero = torch.tensor(0.1, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = STE.apply(x, scale, zero, qdesc)
    assert torch.allclose(out, torch.tensor([-0.2, 0.1, 0.3, 25.3]))
    out.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]
    # inside round(x/s) - x/s, outside the level without its zero point
    assert float(scale.grad) == pytest.approx(-2 + (1 - 1.3) + (3 - 2.7) + 253, rel=1e-5)
    assert float(zero.grad) == pytest.approx(-0.2, rel=1e-5)  # -s for each value outside
