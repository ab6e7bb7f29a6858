"""A transformer class as QuanTransformer's tutorial prints it: grouped convolutions, training, export."""

import inspect
import io
import logging
from collections import OrderedDict

import onnxruntime
import pytest
import torch
from torch import nn

from bitwright.compat.pytorch_quantization import enable_onnx_export
from bitwright.compat.quantrans import (
    QUANLAYERS,
    QUANTRANSFORMERS,
    Basemtransformer,
    ConfigDict,
    build_mtransformer,
    build_quanlayer,
)
from bitwright.compat.quantrans.utils.tools import dict_merge
from bitwright.errors import ConfigError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4, stride=2, padding=1, bias=False), nn.ReLU())
        self.fc = nn.Linear(72, 4)

    def forward(self, x):
        return self.fc(self.body(torch.relu(self.conv1(x))).flatten(1))


def config(kind):
    special = ConfigDict(layers_name=["conv1"], convert_type=[{"type": "LSQConv2d", "num_bit_w": 7, "num_bit_a": 8}])
    layers = {"Conv2d": "LSQConv2d", "Linear": "LSQLinear"}
    policy = {name: {"type": layer, "num_bit_w": 4, "num_bit_a": 4} for name, layer in layers.items()}
    return ConfigDict(type=kind, quan_policy=policy, special_layers=special, model_name="net")


@pytest.fixture
def printed(own_plugins):
    @QUANTRANSFORMERS.register_module()
    class Printed(Basemtransformer, nn.Module):
        def __init__(self, quan_policy=dict(), special_layers=None, **kwargs):  # noqa: B006, C408
            super(Printed, self).__init__()  # noqa: UP008
            self.special_layers = special_layers
            self.register_dict = OrderedDict()
            for key, value in quan_policy.items():
                self.register_dict[getattr(nn, key)] = value
            self.layer_idx = 0

        def __call__(self, model, logger=None, prefix=""):
            for module_name in model._modules:
                current_layer_name = f"{prefix}{module_name}"
                current_layer = getattr(model, module_name)
                if len(current_layer._modules):
                    self(current_layer, logger, f"{current_layer_name}.")
                if type(current_layer) not in self.register_dict:
                    continue
                sig = inspect.signature(type(current_layer))
                new_kwargs = {}
                for key in sig.parameters:
                    if sig.parameters[key].default != inspect.Parameter.empty:
                        continue
                    new_kwargs[key] = getattr(current_layer, key)
                if current_layer_name in self.special_layers.layers_name:
                    idx = self.special_layers.layers_name.index(current_layer_name)
                    quan_args = self.special_layers.convert_type[idx]
                else:
                    quan_args = self.register_dict[type(current_layer)]
                new_quan_layer = build_quanlayer({**quan_args, **new_kwargs})
                dict_merge(new_quan_layer.__dict__, current_layer.__dict__)
                setattr(model, module_name, new_quan_layer)
                self.layer_idx += 1
            return model

    return "Printed"


def test_the_printed_class_and_ours_agree_train_and_export(printed, caplog):
    x = torch.rand(4, 3, 8, 8)
    made = {}
    for kind in (printed, "mTransformerV2"):
        torch.manual_seed(0)
        model = Net()
        weight = model.body[0].weight
        transformer = build_mtransformer(config(kind))
        made[kind] = transformer(model, logger=logging.getLogger("test"))
        assert transformer.layer_idx == 3
        assert model.body[0].weight is weight
        assert (model.body[0].groups, model.body[0].stride, model.conv1.num_bit_w) == (4, (2, 2), 7)
        assert transformer.special_layers.layers_name == ["conv1"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        model.eval()
    assert torch.equal(made[printed](x), made["mTransformerV2"](x))
    assert "does not use model_name" in caplog.text
    buffer = io.BytesIO()
    with enable_onnx_export():
        torch.onnx.export(made[printed], (x,), buffer, input_names=["x"])
    got = onnxruntime.InferenceSession(buffer.getvalue()).run(None, {"x": x.numpy()})[0]
    difference = abs(torch.tensor(got) - made[printed](x))  # a value between two levels may go either way
    assert difference.min() <= 1e-6
    assert difference.mean() <= 0.02 * made[printed](x).abs().max()
    assert difference.max() <= 0.2 * made[printed](x).abs().max()
    with pytest.raises(ConfigError, match="has no argument 'quan_polcy': did you mean 'quan_policy'"):
        build_mtransformer({"type": "mTransformerV2", "quan_polcy": {}})


def test_merging_dicts():
    into = {"a": {"x": 1, "y": 2}, "b": 3}
    dict_merge(into, {"a": {"x": 5}, "c": {"z": 1}})
    assert into == {"a": {"x": 5, "y": 2}, "b": 3, "c": {"z": 1}}


CONVOLUTIONS = [name for name in QUANLAYERS.names() if "Conv" in name]
LINEAR = [name for name in QUANLAYERS.names() if "Linear" in name]


@pytest.mark.parametrize("place", range(len(CONVOLUTIONS)))
def test_every_layer_trains_and_exports(place):
    torch.manual_seed(0)
    policy = {"Conv2d": {"type": CONVOLUTIONS[place]}, "Linear": {"type": LINEAR[place % len(LINEAR)]}}
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    model = build_mtransformer({"type": "mTransformerV2", "quan_policy": policy})(net)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.rand(4, 3, 8, 8)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    buffer = io.BytesIO()
    with enable_onnx_export(), torch.no_grad():
        torch.onnx.export(model, (x,), buffer, input_names=["x"])
        expected = model(x)
    options = onnxruntime.SessionOptions()
    for level, limit in (("ORT_DISABLE_ALL", 1e-4), ("ORT_ENABLE_ALL", 0.1)):  # as it is written, then in integers
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(buffer.getvalue(), options)
        got = torch.tensor(session.run(None, {"x": x.numpy()})[0])
        assert (got - expected).abs().median() <= limit * expected.abs().max()
