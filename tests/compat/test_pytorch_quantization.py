"""Code written for pytorch-quantization, with only the import root changed."""

import copy
import importlib
import logging

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
import bitwright.compat.pytorch_quantization as pytorch_quantization
from bitwright.compat.pytorch_quantization import calib, quant_modules, tensor_quant
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization.nn.modules import _utils
from bitwright.compat.pytorch_quantization.optim import helper
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from bitwright.compat.pytorch_quantization.utils import quant_logging, reduce_amax

ROOT = "bitwright.compat.pytorch_quantization"


class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(8, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Conv2d(8, width, 1, stride, bias=False)
        self.residual_quantizer = quant_nn.TensorQuantizer(quant_nn.QuantConv2d.default_quant_desc_input)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.residual_quantizer(self.downsample(x)))


class TinyResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = Block(16, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.pool(self.block(F.relu(self.stem(x)))).flatten(1))


@pytest.fixture
def restored():
    """The defaults of classes, and torch.nn, as they were."""
    classes = [quant_nn.QuantConv2d, quant_nn.QuantLinear, quant_nn.QuantAdaptiveAvgPool2d]
    before = [cls.__dict__.get("default_quant_desc_input") for cls in classes]
    yield
    quant_modules.deactivate()
    for cls, value in zip(classes, before, strict=True):
        if value is None:
            if "default_quant_desc_input" in cls.__dict__:
                del cls.default_quant_desc_input
        else:
            cls.default_quant_desc_input = value


def build():
    quant_desc_input = QuantDescriptor(calib_method="histogram")
    quant_nn.QuantConv2d.set_default_quant_desc_input(quant_desc_input)
    quant_nn.QuantLinear.set_default_quant_desc_input(quant_desc_input)
    quant_modules.initialize()
    torch.manual_seed(0)
    model = TinyResNet()
    quant_modules.deactivate()
    return model


def collect_stats(model, data_loader):
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.disable_quant()
                module.enable_calib()
            else:
                module.disable()
    for image, _ in data_loader:
        model(image)
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.enable_quant()
                module.disable_calib()
            else:
                module.enable()


def compute_amax(model, **kwargs):
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer) and module._calibrator is not None:
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax()
            else:
                module.load_calib_amax(**kwargs)


def loader():
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))) for _ in range(3)]


def plain(model):
    """The same computation without quantizers."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            module.disable()
    return copied


@pytest.fixture
def model(restored):
    made = build().eval()
    with torch.no_grad():
        collect_stats(made, loader())
        compute_amax(made, method="percentile", percentile=99.99)
    return made


@pytest.mark.parametrize(
    "options", [{"method": "percentile", "percentile": 99.99}, {"method": "entropy"}, {"method": "mse"}]
)
def test_post_training_script(restored, options):
    model, data = build().eval(), loader()
    assert isinstance(model.stem, quant_nn.QuantConv2d)
    assert isinstance(model.stem._input_quantizer._calibrator, calib.HistogramCalibrator)
    assert isinstance(model.stem._weight_quantizer._calibrator, calib.MaxCalibrator)
    with torch.no_grad():
        collect_stats(model, data)
        assert not hasattr(model.stem._input_quantizer, "_amax")
        compute_amax(model, **options)
        largest = max(float(x.abs().max()) for x, _ in data)
        assert 0.3 * largest < float(model.stem._input_quantizer._amax) <= largest * 1.001
        weight = model.stem.weight
        assert torch.equal(model.stem._weight_quantizer._amax, weight.abs().amax((1, 2, 3), keepdim=True))
        x = data[0][0]
        assert 0 < float((model(x) - plain(model)(x)).abs().max()) < 0.1


def test_fine_tuning_and_checkpoints(model, restored, tmp_path):
    data = loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    before, losses = model.stem.weight.detach().clone(), []
    for image, label in [data[0], data[0]]:
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    assert not torch.equal(model.stem.weight, before)
    torch.save(model.state_dict(), tmp_path / "quant.pth")
    state = torch.load(tmp_path / "quant.pth", weights_only=True)
    assert float(state["block.conv1._input_quantizer._amax"]) > 0
    fresh = build()
    fresh.load_state_dict(state)
    x = data[1][0]
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_attributes_that_scripts_touch(model):
    quantizer = model.fc._input_quantizer
    assert quantizer is model.fc.input_quantizer
    assert model.fc._weight_quantizer is model.fc.weight_quantizer
    assert (quantizer._disabled, quantizer._if_quant, quantizer._if_calib, quantizer._if_clip) == (
        False,
        True,
        False,
        False,
    )
    assert (quantizer._num_bits, quantizer._axis, quantizer._unsigned, quantizer._narrow_range) == (8, None, False, 0)
    assert (quantizer._fake_quant, quantizer._learn_amax, quantizer._scale_amax) == (True, False, None)
    assert quantizer.amax is quantizer._amax
    assert torch.equal(quantizer.step_size, quantizer.amax / 127)
    model.fc.input_quantizer.disable()
    assert quantizer._disabled
    assert quantizer._if_quant
    quantizer.enable()
    quantizer.amax = 3.0
    assert float(quantizer._amax) == 3.0
    with pytest.raises(TypeError, match="Changing shape when setting amax is not allowed"):
        quantizer.amax = [1.0, 2.0]
    quantizer._calibrator.reset()
    with pytest.raises(RuntimeError, match="Calibrator returned None"):
        quantizer.load_calib_amax("entropy")


def test_the_layers_replaced_are_the_old_ones(restored):
    originals = (nn.GRU, nn.MultiheadAttention, nn.MaxPool2d, nn.Conv2d)
    quant_modules.initialize(float_module_list=["Linear", "MaxPool2d"])
    assert (nn.GRU, nn.MultiheadAttention, nn.MaxPool2d) == originals[:3]
    assert nn.Conv2d is quant_nn.QuantConv2d
    assert nn.LSTM is quant_nn.QuantLSTM
    assert nn.Linear is not quant_nn.QuantLinear
    quant_modules.initialize()  # again, as notebooks do
    assert nn.Linear is quant_nn.QuantLinear
    pytorch_quantization.deactivate()
    assert nn.Conv2d is originals[3]
    with pytest.raises(bw.errors.UnknownNameError, match="no layer named 'Linearr' would be replaced"):
        pytorch_quantization.initialize(["Linearr"])
    assert nn.Conv2d is originals[3]


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("narrow_range", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_values_are_those_of_the_formula(num_bits, narrow_range, unsigned):
    x = torch.randn(500) * 2
    x = x.abs() if unsigned else x
    amax = torch.tensor(2.5)
    top = 2.0 ** (num_bits - 1 + unsigned) - 1
    low = 0 if unsigned else -top if narrow_range else -top - 1
    scale = torch.tensor(top) / amax
    integers = torch.clamp((x * scale).round(), low, top)
    q, found = tensor_quant.tensor_quant(x, amax, num_bits, unsigned, narrow_range)
    assert torch.equal(q, integers)
    assert torch.equal(found, scale)
    for function in (tensor_quant.fake_tensor_quant, tensor_quant.legacy_fake_tensor_quant):
        assert torch.equal(function(x, amax, num_bits, unsigned, narrow_range), integers / scale)


def test_other_functions():
    x = torch.tensor([-3.0, -0.5, 0.2, 5.0], requires_grad=True)
    end = torch.tensor(1.0, requires_grad=True)
    quant_nn.functional.clip(x, torch.tensor(-1.0), end).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]
    assert float(end.grad) == 1
    assert quant_nn.Clip(-1.0, 1.0)(x).tolist() == pytest.approx([-1.0, -0.5, 0.2, 1.0])
    assert float(reduce_amax(x)) == 5
    assert reduce_amax(torch.ones(2, 3, 4), axis=(0, 2)).shape == (1, 3, 1)
    y = torch.linspace(-448, 448, 50)
    assert torch.equal(tensor_quant.scaled_e4m3(y), y.to(torch.float8_e4m3fn).float())
    assert torch.allclose(tensor_quant.fake_affine_tensor_quant(y, -448.0, 448.0), y, atol=896 / 255 / 2 + 1e-4)
    with pytest.raises(TypeError, match="Negative values encountered in unsigned"):
        tensor_quant.fake_tensor_quant(y, torch.tensor(1.0), unsigned=True)
    with pytest.raises(ValueError, match="Negative values in amax"):
        tensor_quant.fake_tensor_quant(y, torch.tensor(-1.0))


def test_descriptors():
    assert tensor_quant.ScaledQuantDescriptor is QuantDescriptor is bw.QuantDescriptor
    assert tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL.axis == 0
    assert tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL.axis == 1
    assert tensor_quant.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR.unsigned
    with pytest.raises(TypeError, match="Unused keys"):
        QuantDescriptor(num_bit=4)


@pytest.mark.parametrize(
    ("path", "names"),
    {
        "nn.modules.tensor_quantizer": ["TensorQuantizer"],
        "nn.modules.quant_conv": ["QuantConv1d", "QuantConvTranspose3d", "Conv2d"],
        "nn.modules.quant_linear": ["QuantLinear", "Linear"],
        "nn.modules.quant_pooling": ["QuantMaxPool1d", "AvgPool2d", "AdaptiveAvgPool3d"],
        "nn.modules.quant_instancenorm": ["QuantInstanceNorm2d", "InstanceNorm1d"],
        "nn.modules.quant_rnn": ["QuantLSTM", "LSTMCell"],
        "nn.modules.clip": ["Clip"],
        "nn.modules._utils": ["QuantMixin", "QuantInputMixin", "pop_quant_desc_in_kwargs"],
        "nn.functional": ["clip"],
        "calib.max": ["MaxCalibrator"],
        "calib.histogram": ["HistogramCalibrator", "calibrate_weights"],
        "calib.calibrator": ["_Calibrator"],
        "utils.reduce_amax": ["reduce_amax"],
        "optim.helper": ["match_parameters", "group_parameters", "freeze_parameters", "quant_weight_inplace"],
        "quant_modules": ["initialize", "deactivate", "enable_onnx_export"],
    }.items(),
)
def test_the_layout(path, names):
    module = importlib.import_module(f"{ROOT}.{path}")
    assert [getattr(module, n).__module__.startswith("bitwright.") for n in names] == [True] * len(names)


def test_aliases_are_the_quantized_modules():
    aliases = [n for n in vars(quant_nn) if hasattr(quant_nn, f"Quant{n}")]
    assert {"Conv2d", "ConvTranspose1d", "Linear", "LSTM", "LSTMCell", "MaxPool3d", "InstanceNorm2d"} <= set(aliases)
    assert all(getattr(quant_nn, n) is getattr(quant_nn, f"Quant{n}") for n in aliases)
    assert {"Clip", "QuantMixin", "QuantInputMixin", "TensorQuantizer", "functional", "modules"} <= vars(
        quant_nn
    ).keys()


def test_a_module_and_a_calibrator_of_ones_own():
    class QuantRound(nn.Hardtanh, _utils.QuantInputMixin):
        def __init__(self, **kwargs):
            super().__init__()
            self.init_quantizer(_utils.pop_quant_desc_in_kwargs(self.__class__, input_only=True, **kwargs))

        def forward(self, input):
            return super().forward(self._input_quantizer(input))

    class Twice(calib.calibrator._Calibrator):
        amax = None

        def collect(self, x):
            self.amax = 2 * x.abs().max()

        def reset(self):
            self.amax = None

        def compute_amax(self):
            return self.amax

    module = QuantRound(quant_desc_input=QuantDescriptor(num_bits=4))
    module.input_quantizer._calibrator = Twice(4, None, False)
    module.input_quantizer.enable_calib()
    module(torch.tensor([0.25, -0.5]))
    module.input_quantizer.load_calib_amax()
    assert float(module.input_quantizer.amax) == 1.0
    assert torch.allclose(module(torch.tensor([0.3])), torch.tensor([2 / 7]))


def test_weights_and_parameters(model):
    calib.calibrate_weights(model, method="max", perchannel=False)
    assert float(model.fc._weight_quantizer.amax) == float(model.fc.weight.detach().abs().max())
    assert list(helper.match_parameters(model, ["fc"])) == list(model.fc.parameters())
    helper.freeze_parameters(model, ["stem"])
    assert not model.stem.weight.requires_grad
    x = loader()[0][0]
    want = model(x)
    helper.quant_weight_inplace(model)
    assert torch.allclose(model(x), want, atol=1e-5)


def test_logging():
    logger = logging.getLogger("bitwright")
    logger.addHandler(logging.NullHandler())
    quant_logging.reset_logger_handler()
    assert logger.handlers == []
    assert logger.propagate


def test_onnx_export(model, tmp_path):
    original, x = torch.onnx.export, loader()[0][0]
    for module in model.modules():  # x86 CPUs without VNNI saturate with 8 bits
        if isinstance(module, _utils.QuantMixin):
            module.weight_quantizer.num_bits = 7
    path = tmp_path / "resnet.onnx"
    with pytorch_quantization.enable_onnx_export():
        torch.onnx.export(model, x, str(path), opset_version=13, verbose=False)
    assert torch.onnx.export is original
    kinds = [n.op_type for n in onnx.load(path).graph.node]
    assert kinds.count("QuantizeLinear") >= 6
    assert kinds.count("DequantizeLinear") >= 11
    assert torch.allclose(bw.run_file(path)(x), model(x), atol=0.02)
    with pytest.raises(ZeroDivisionError), quant_modules.enable_onnx_export():
        _ = 1 / 0
    assert torch.onnx.export is original
