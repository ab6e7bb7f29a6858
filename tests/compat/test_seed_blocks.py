"""Every code block of the five documents, as printed: only the import root is changed.

``seed_blocks.txt`` has them all. Where one does not stand alone (a fragment, a body left out, an ellipsis, a missing
comma), what is filled in stands here.
"""

import importlib
import io
import logging
import operator
import re
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import pooling

import bitwright.compat.mqbench.nn as qnn
import bitwright.compat.quantrans.quantops as quantops
from bitwright.compat.mqbench.convert_deploy import convert_deploy
from bitwright.compat.mqbench.fuser_method_mappings import ConvBNReLUFusion, fuse_linear_bn
from bitwright.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform
from bitwright.compat.mqbench.utils.state import enable_calibration, enable_quantization
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization.nn import TensorQuantizer
from bitwright.compat.pytorch_quantization.nn.modules import _utils
from bitwright.compat.quantrans import Basemtransformer, Config, build_mtransformer, build_quanlayer
from bitwright.compat.quantrans.utils.tools import dict_merge
from bitwright.compat.sparsebit.quantization import QuantModel, parse_qconfig
from bitwright.compat.sparsebit.quantization.converters import fuse_operations, simplifiers
from bitwright.compat.sparsebit.quantization.modules import QuantOpr, register_qmodule
from bitwright.compat.sparsebit.quantization.quant_config import _C
from bitwright.graph import SCHEDULES
from bitwright.nn import unregister_qmodule
from bitwright.quantizer import quantizers
from tests.compat.mqbench.nets import Net as Resnet
from tests.compat.sparsebit.nets import YAML

TEXT = (Path(__file__).parent / "seed_blocks.txt").read_text()
BLOCKS = dict(re.findall(r"^##### (\S+) \w+\n(.*?)\n(?=\n##### |\s*\Z)", TEXT, flags=re.DOTALL | re.MULTILINE))


def filled(number, *changes):
    """A block with what it leaves out."""
    text = BLOCKS[number]
    for printed, meant in changes:
        assert printed in text
        text = text.replace(printed, meant)
    return text


def run(text, **names):
    exec(text, names)
    return names


def test_all_blocks_are_known():
    counts = {seed: sum(number.startswith(seed) for number in BLOCKS) for seed in ("000", "001", "002", "003", "004")}
    assert counts == {"000": 1, "001": 11, "002": 9, "003": 3, "004": 4}


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3)

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.pool(self.conv(x)), (2, 2))


def test_000_a_qmodule():
    made = run(BLOCKS["000.0"], register_qmodule=register_qmodule, QuantOpr=QuantOpr, nn=nn, F=F)["QAdaptiveAvgPool2d"]
    try:
        net, x = Pools().eval(), torch.randn(2, 3, 9, 9)
        model = QuantModel(net, parse_qconfig(YAML))
        assert torch.equal(model(x), net(x))
        assert [m.output_size for m in model.modules() if isinstance(m, made)] == [3, (2, 2)]
        model.prepare_calibration()
        model(x)
        model.calc_qparams()
        model.set_quant(w_quant=True, a_quant=True)
        assert 0 < (model(x) - net(x)).abs().max() < 0.1
    finally:
        unregister_qmodule(made)


def assembled(*numbers):
    """A class from the fragments that explain it."""
    head, *parts = (textwrap.dedent(BLOCKS[number]) for number in numbers)
    return head + "\n" + "\n".join(textwrap.indent(part, "    ") for part in parts)


@pytest.mark.parametrize("text", [assembled("001.0", "001.1", "001.2", "001.3"), BLOCKS["001.4"]])
def test_001_a_pool(text):
    pool = run(text, pooling=pooling, _utils=_utils)["QuantMaxPool2d"](2)
    x = torch.randn(1, 2, 6, 6)
    scale = torch.tensor(127.0) / x.abs().max()
    assert torch.equal(pool(x), F.max_pool2d(torch.round(x * scale) / scale, 2))
    pool.input_quantizer.disable()
    assert torch.equal(pool(x), F.max_pool2d(x, 2))


@pytest.mark.parametrize("text", [assembled("001.5", "001.6", "001.7", "001.8"), BLOCKS["001.9"]])
def test_001_a_linear_layer(text):
    layer = run(text, nn=nn, _utils=_utils, F=F)["QuantLinear"](6, 4)
    x, weight = torch.randn(3, 6), layer.weight.detach()
    scales = [torch.tensor(127.0) / amax for amax in (x.abs().max(), weight.abs().amax(1, keepdim=True))]
    values = [torch.round(t * scale) / scale for t, scale in zip((x, weight), scales, strict=True)]
    assert torch.equal(layer(x), F.linear(*values, layer.bias))
    layer.input_quantizer.disable()
    layer.weight_quantizer.disable()
    assert torch.equal(layer(x), F.linear(x, weight, layer.bias))


def test_001_in_the_graph():
    made = run(BLOCKS["001.10"], torch=torch, TensorQuantizer=TensorQuantizer, quant_nn=quant_nn, F=F)
    x = made["test_input"]
    scale = torch.tensor(127.0) / x.abs().max()
    assert made["out"].dtype == torch.double
    assert torch.equal(made["out"], F.adaptive_avg_pool2d(torch.round(x * scale) / scale, 3))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=3)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), Head()

    def forward(self, x):
        return self.head(self.backbone(x))


BODIES = [
    (
        "def __init__(self, *args):\n",
        "def __init__(self, *args, num_bit_w, num_bit_a, bSetQ, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n        self.num_bit_w = num_bit_w\n",
    ),
    (
        "def quantize_(self, x, *args):\n        pass",
        "def quantize_(self, x, *args):\n        step = x.abs().max() / (2 ** (self.num_bit_w - 1) - 1)\n"
        "        return x + (torch.round(x / step) * step - x).detach()",
    ),
    (
        "def forward(self, x):\n        pass",
        "def forward(self, x):\n        return self._conv_forward(x, self.quantize_(self.weight), self.bias)",
    ),
]


@pytest.fixture
def dsqv2(own_plugins, tmp_path, monkeypatch):
    """The folder that the tutorial adds to ``quantops``."""
    folder = tmp_path / "DSQv2"
    folder.mkdir()
    (folder / "DSQConvV2.py").write_text(filled("002.0", *BODIES))
    (folder / "__init__.py").write_text(BLOCKS["002.1"])
    monkeypatch.setattr(quantops, "__path__", [*quantops.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    yield importlib.import_module("bitwright.compat.quantrans.quantops.DSQv2").DSQConvV2
    quantops.builder.QUANLAYERS.unregister("DSQConvV2")
    for name in [name for name in sys.modules if ".DSQv2" in name]:
        del sys.modules[name]


def test_002_a_layer_and_a_transformer(dsqv2, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(BLOCKS["002.2"])
    names = {"cfg": Config.fromfile(path), "model": Net(), "logger": logging.getLogger("test")}
    weight = names["model"].backbone.conv2.weight
    names = run(BLOCKS["002.3"] + "\n" + BLOCKS["002.5"], build_mtransformer=build_mtransformer, **names)
    model, x = names["model"], torch.randn(2, 3, 9, 9)
    kinds = [type(m).__name__ for m in (model.backbone.conv1, model.backbone.conv2, model.head.fc)]
    assert kinds == ["DSQConv", "DSQConvV2", "DSQLinear"]
    assert type(model.backbone.conv2) is dsqv2
    assert (model.backbone.conv2.weight is weight, model.backbone.conv2.groups) == (True, 3)
    assert len(model.backbone.conv2.quantize_(weight).unique()) <= 7
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_002_the_transformer_as_printed(dsqv2, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(BLOCKS["002.2"])
    cfg = {key: value for key, value in Config.fromfile(path).quant_transformer.items() if key != "type"}
    printed = run(BLOCKS["002.4"], Basemtransformer=Basemtransformer, nn=nn, OrderedDict=OrderedDict)["mTransformerV2"]
    transformer = printed(**cfg)
    assert type(transformer(Net()).backbone.conv2) is dsqv2
    loop = "\n".join(BLOCKS[number] for number in ("002.6", "002.7", "002.8"))
    text = (
        "def convert(self, model, prefix):\n    for module_name, current_layer in list(model.named_children()):\n"
        "        current_layer_name = prefix + module_name\n" + textwrap.indent(loop, " " * 8)
    )
    import inspect

    tools = {"inspect": inspect, "build_quanlayer": build_quanlayer, "dict_merge": dict_merge}
    convert, backbone = run(text, **tools)["convert"], Backbone()
    convert(transformer, backbone, "backbone.")
    # As it is printed, special layers are only looked up: what builds them stands in the other branch.
    assert (type(backbone.conv1), type(backbone.conv2)) == (nn.Conv2d, dsqv2)
    assert backbone(torch.randn(1, 3, 9, 9)).shape == (1, 6, 5, 5)


SCHEDULE = """
import torch
from bitwright.compat.sparsebit.quantization.converters.base import MatcherNode, ReplacePatternBase

class ReplacePattern(ReplacePatternBase):
    def make_ops(self):
        return [MatcherNode("act", [None], [torch.relu])]

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        node_to_replace = nodes_dict["act"]
"""
ELLIPSES = [
    ("op=...", 'op="call_function"'),
    ("target=...", "target=torch.sigmoid"),
    ("args=...", "args=node_to_replace.args"),
    ("name=...", 'name=f"sigmoid_{transform_idx}"'),
    ("        ...,\n", ""),
]


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return torch.relu(self.conv(x))


@pytest.mark.parametrize("package", [simplifiers, fuse_operations])
def test_003_a_schedule(package, tmp_path, monkeypatch):
    name = "name_of_your_transformation_file"
    body = textwrap.indent(filled("003.2", *ELLIPSES), " " * 8) + "\n        return new_node\n"
    (tmp_path / f"{name}.py").write_text(SCHEDULE + body)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    package.lists.fuse_list.append(name)
    net, x = Activated().eval(), torch.randn(1, 3, 4, 4)
    try:
        for switch, wanted in (("True", torch.sigmoid(net.conv(x))), ("False", net(x))):
            run(filled("003.0", ("True / False", switch)), _C=_C)
            assert torch.equal(QuantModel(net, parse_qconfig(YAML))(x), wanted)
        assert "SCHEDULE:\n" in YAML
        asked = YAML.replace("SCHEDULE:\n", BLOCKS["003.1"].replace("    ", "  ") + "\n")
        assert torch.equal(QuantModel(net, parse_qconfig(asked))(x), torch.sigmoid(net.conv(x)))
    finally:
        sys.modules.pop(name, None)
        SCHEDULES.unregister(name)
        del _C.SCHEDULE[name.upper()]


QUOTES = [
    ("[layer1_1_conv1]", "['layer1_1_conv1']"),
    ("[layer2.1.relu,]", "['layer2.1.relu',]"),
    ("}\n    'extra_fuse_dict'", "},\n    'extra_fuse_dict'"),
]


def seed_004():
    text = filled("004.0", *QUOTES)
    names = {"ConvBNReLUFusion": ConvBNReLUFusion, "fuse_linear_bn": fuse_linear_bn, "qnn": qnn, "nn": nn}
    return run(text, torch=torch, operator=operator, **names)["extra_config"]


def calibrated(model, x):
    enable_calibration(model)
    model(x)
    enable_quantization(model)
    return model


def test_004_the_configuration(tmp_path):
    torch.manual_seed(0)
    names = {"prepare_by_platform": prepare_by_platform, "backend": BackendType.Academic, "model": Resnet().eval()}
    prepared = run(BLOCKS["004.1"], extra_config=seed_004(), **names)["prepared"]
    x = torch.randn(4, 3, 8, 8)
    assert prepared.func1() == "kept"
    calibrated(prepared, x)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-3)
    prepared.train()(x).square().mean().backward()
    before = prepared.fc.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(prepared.fc.weight, before)
    prepared.eval()
    path = convert_deploy(prepared, BackendType.Academic, dummy_input=x, output_path=tmp_path, input_names=["x"])
    got = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        expected = prepared(x).numpy()
    assert np.abs(got - expected).max() <= 0.1 * np.abs(expected).max()


def listed(number):
    return re.findall(r"\d+\. (\w+)", BLOCKS[number])


def test_004_every_observer_and_quantizer_listed():
    assert (len(listed("004.2")), len(listed("004.3"))) == (9, 8)
    x = torch.randn(4, 3, 8, 8)
    for kind, number, shown in (("observer", "004.2", "observer_name"), ("fakequantize", "004.3", "method_name")):
        for name in listed(number):
            powers = {"pot_scale": name.startswith("Tqt")}
            schemes = {f"{letter}_qscheme": {"bit": 8, "symmetry": True, **powers} for letter in "wa"}
            config = {"extra_qconfig_dict": {f"w_{kind}": name, f"a_{kind}": name, **schemes}}
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
            model = calibrated(prepare_by_platform(net, BackendType.Academic, config), x)
            assert {getattr(quantizer, shown) for quantizer in quantizers(model).values()} == {name}
            assert not torch.equal(model(x), net(x))
            assert F.cosine_similarity(model(x).flatten(), net(x).flatten(), 0) > 0.8, name  # DoReFa has other weights


def test_a_file_like_the_tutorials_exports():
    """A model with the module of 001.9 goes to onnxruntime."""
    from bitwright.compat.pytorch_quantization import enable_onnx_export

    layer = run(BLOCKS["001.9"], nn=nn, _utils=_utils, F=F)["QuantLinear"](6, 4).eval()
    x, buffer = torch.randn(3, 6), io.BytesIO()
    layer.input_quantizer.amax = x.abs().max()
    layer.weight_quantizer.amax = layer.weight.detach().abs().amax(1, keepdim=True) * 2  # 7 bits, for any CPU
    with enable_onnx_export():
        torch.onnx.export(layer, (x,), buffer, input_names=["x"])
    got = onnxruntime.InferenceSession(buffer.getvalue()).run(None, {"x": x.numpy()})[0]
    assert np.abs(got - layer(x).detach().numpy()).max() <= 1e-5
