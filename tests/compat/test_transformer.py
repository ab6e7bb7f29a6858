"""QuanTransformer's model transformer: the seed's config, what is carried over, and what is refused, untouched."""

import copy
import logging
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.compat.quantrans import (
    QUANLAYERS,
    QUANTRANSFORMERS,
    Basemtransformer,
    Config,
    ConfigDict,
    DSQConv,
    DSQConvV2,
    DSQLinear,
    LSQConv2d,
    LSQLinear,
    Qmodes,
    build_mtransformer,
    mTransformerV2,
)
from bitwright.errors import ConfigError, UnknownNameError

SEED = """
quant_transformer = dict(
    type = "mTransformerV2",
    quan_policy=dict(
        Conv2d=dict(type='DSQConvV2', num_bit_w=3, num_bit_a=3, bSetQ=True),
        ),
    special_layers = dict(
        layers_name = [
            'backbone.conv1',
            'head.fc'],
        convert_type = [dict(type='DSQConv', num_bit_w=8, num_bit_a=8, bSetQ=True, quant_activation=False),
                        dict(type='DSQLinear', num_bit_w=8, num_bit_a=8)]
        )
)
"""


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=2, dilation=2, bias=False, padding_mode="reflect")
        self.conv2 = nn.Conv2d(6, 6, 3, padding="same", groups=3)
        self.again = self.conv2

    def forward(self, x):
        return F.relu(self.again(F.relu(self.conv2(F.relu(self.conv1(x))))))


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


def policy(**more):
    return {"type": "mTransformerV2", "quan_policy": {"Conv2d": {"type": "LSQConv2d", "num_bit_w": 4}}, **more}


def snapshot(model):
    return {
        name: (module, module.training, list(module._forward_hooks), {k: id(v) for k, v in module._parameters.items()})
        for name, module in model.named_modules(remove_duplicate=False)
    }


@pytest.fixture
def x():
    return torch.rand(2, 3, 12, 12)


def test_the_seeds_config_as_printed(tmp_path, x, caplog):
    path = tmp_path / "quant.py"
    path.write_text(SEED)
    cfg = Config.fromfile(path)
    assert cfg.quant_transformer.special_layers.layers_name == ["backbone.conv1", "head.fc"]
    assert cfg["quant_transformer"]["quan_policy"].Conv2d["num_bit_w"] == 3
    model, logger = Net(), logging.getLogger("user")
    model_transformer = build_mtransformer(cfg.quant_transformer)
    with caplog.at_level(logging.INFO, logger="user"):
        model = model_transformer(model, logger=logger)
    assert [type(m) for m in (model.backbone.conv1, model.backbone.conv2, model.head.fc)] == [
        DSQConv,
        DSQConvV2,
        DSQLinear,
    ]
    bits = [(m.num_bit_w, m.num_bit_a, m.quant_activation) for m in (model.backbone.conv1, model.backbone.conv2)]
    assert bits == [(8, 8, False), (3, 3, True)]
    assert "backbone.conv1: Conv2d becomes DSQConv" in caplog.messages
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_everything_of_the_old_layer_is_carried_over(x):
    model = Net().eval()
    model.backbone.conv2.train()
    model.head.fc.note = "mine"
    seen = []
    handle = model.backbone.conv1.register_forward_hook(lambda *_: seen.append("hook"))
    model.head.fc.register_forward_pre_hook(lambda m, args, kwargs: seen.append("kwargs"), with_kwargs=True)
    before, parameters = model(x), dict(model.named_parameters())
    quan_policy = {"Conv2d": {"type": "LSQConv2d", "bSetQ": False}, "Linear": {"type": "LSQLinear", "bSetQ": False}}
    made = mTransformerV2(quan_policy)(model)
    assert made is model
    assert {n: p for n, p in made.named_parameters() if n in parameters} == parameters
    assert torch.equal(made(x), before)
    assert (type(made.backbone.conv1), type(made.head.fc)) == (LSQConv2d, LSQLinear)
    conv1, conv2 = made.backbone.conv1, made.backbone.conv2
    settings = (conv1.stride, conv1.padding, conv1.dilation, conv1.bias, conv1.padding_mode)
    assert settings == ((2, 2), (2, 2), (2, 2), None, "reflect")
    assert (conv2.padding, conv2.groups, conv2.training, conv1.training) == ("same", 3, True, False)
    assert made.backbone.again is conv2
    assert made.head.fc.note == "mine"
    assert seen == ["hook", "kwargs"] * 2
    handle.remove()
    made(x)
    assert seen == ["hook", "kwargs"] * 2 + ["kwargs"]


def test_double_precision_and_a_weight_made_by_a_hook(x):
    model = Net().double()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.head.fc)
    before = model(x.double())
    mTransformerV2({"Linear": {"type": "LSQLinear", "bSetQ": False}})(model)
    assert {"weight_g", "weight_v"} < set(dict(model.head.fc.named_parameters()))
    assert model.head.fc.weight.dtype is torch.float64
    assert torch.equal(model(x.double()), before)


def test_settings_never_leak_into_another_layer():
    args = {"type": "LSQConv2d", "num_bit_w": 4, "q_mode": Qmodes.kernel_wise}
    config = policy(quan_policy={"Conv2d": args})
    untouched = copy.deepcopy(config)

    class Keeps(nn.Conv2d):
        def __init__(self, *a, table, **kwargs):
            super().__init__(*a, **kwargs)
            self.table = table

    model = build_mtransformer(config)(Net())
    assert config == untouched
    model.backbone.conv1.options.__dict__["num_bit_w"] = 7
    assert model.backbone.conv2.num_bit_w == 4
    shared = {"type": Keeps, "table": {"a": [1]}}
    model = mTransformerV2({"Conv2d": shared})(Net())
    model.backbone.conv1.table["a"].append(2)
    assert model.backbone.conv2.table == shared["table"] == {"a": [1]}


def test_a_model_that_is_itself_a_layer(x):
    conv = nn.Conv2d(3, 4, 3)
    made = build_mtransformer(policy())(conv)
    assert type(made) is LSQConv2d
    assert made.weight is conv.weight
    assert made(x).shape == (2, 4, 10, 10)


def test_excluded_layers_stay(x):
    model = Net()
    conv2 = model.backbone.conv2
    build_mtransformer(policy())(model, exclude_layers=["backbone.conv2", "backbone.again"])
    assert (type(model.backbone.conv1), model.backbone.conv2) == (LSQConv2d, conv2)
    with pytest.raises(ConfigError, match="no layer of the model is replaced: quan_policy names Conv2d"):
        build_mtransformer(policy())(Net(), exclude_layers="backbone")


def test_special_layers_as_attributes_and_none(x):
    class Special:
        layers_name = ("head.fc",)
        convert_type = (ConfigDict(type="EightBitQuantLinear"),)

    made = build_mtransformer(policy(special_layers=Special()))(Net())
    assert type(made.head.fc).__name__ == "EightBitQuantLinear"
    assert type(build_mtransformer(policy(special_layers=None))(Net()).head.fc) is nn.Linear


def test_ones_own_transformer_as_the_seed_prints_it(x):
    @QUANTRANSFORMERS.register_module()
    class Mine(Basemtransformer, nn.Module):
        def __init__(self, quan_policy=dict(), special_layers=None, **kwargs):  # noqa: B006, C408
            super(Mine, self).__init__()  # noqa: UP008
            self.special_layers = special_layers
            self.register_dict = OrderedDict()
            for key, value in quan_policy.items():
                assert hasattr(nn, key)
                self.register_dict[getattr(nn, key)] = value
            self.layer_idx = 0

    try:
        model = build_mtransformer({**policy(), "type": "Mine"})(Net())
        assert type(model.backbone.conv1) is LSQConv2d
        assert QUANTRANSFORMERS.names() == ["Mine", "QuanTransformer", "mTransformerV2"]
    finally:
        QUANTRANSFORMERS.unregister("Mine")


def test_a_class_without_all_of_the_constructors_arguments(x):
    @QUANLAYERS.register_module()
    class Short(nn.Conv2d):
        def __init__(self, in_channels, out_channels, kernel_size, num_bit_w=8):
            super().__init__(in_channels, out_channels, kernel_size)
            self.num_bit_w = num_bit_w

    try:
        model = Net()
        before = model(x)
        made = mTransformerV2({"Conv2d": {"type": "Short", "num_bit_w": 3}})(model)
        assert made.backbone.conv2.num_bit_w == 3
        assert torch.equal(made(x), before)  # stride, padding and groups are there all the same
    finally:
        QUANLAYERS.unregister("Short")


def test_the_fused_path_of_torch_does_not_pass_the_layers_by():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    before = model(x)
    mTransformerV2({"Linear": {"type": "LSQLinear", "num_bit_w": 2, "num_bit_a": 2, "signed": True}})(model)
    with torch.no_grad():
        assert not torch.allclose(model(x), before, atol=1e-3)


class Wrapped(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.inner = nn.Linear(in_features, out_features)


class Transposed(nn.Linear):
    def __init__(self, in_features, out_features, **kwargs):
        super().__init__(out_features, in_features, **kwargs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (policy(type="mTransformerV3"), r"unknown model transformer 'mTransformerV3': did you mean 'mTransformerV2'"),
        (policy(quan_polcy={}), r"mTransformerV2 has no argument 'quan_polcy': did you mean 'quan_policy'"),
        ({"quan_policy": {}}, r"a model transformer needs a dict with the key 'type'"),
        (policy(quan_policy={"Conv2D": {"type": "DSQConv"}}), r"torch.nn has no layer 'Conv2D': did you mean 'Conv2d'"),
        (policy(quan_policy={"functional": {"type": "DSQConv"}}), r"torch.nn has no layer 'functional'"),
        (policy(quan_policy={"Conv2d": {"type": "DSQConvv"}}), r"unknown quantized layer 'DSQConvv': .*'DSQConv'"),
        (
            policy(quan_policy={"Conv2d": "DSQConv"}),
            r"'Conv2d': a quantized layer needs a dict",
        ),
        (policy(quan_policy={"Conv2d": {"type": "LSQConv2d", "num_bits_w": 3}}), r"'num_bits_w': did you mean"),
        (
            policy(quan_policy={"Conv2d": {"type": "LSQLinear"}}),
            r"LSQLinear is a kind of Linear: 'backbone.conv1' is a",
        ),
        (policy(quan_policy={"Conv2d": {"type": "LSQConv2d", "stride": 1}}), r"LSQConv2d takes stride from the layer"),
        (
            policy(quan_policy={"Conv3d": {"type": "LSQConv2d"}}),
            r"quan_policy names Conv3d, the model has 2 Conv2d",
        ),
        (policy(quan_policy={"Linear": {"type": Wrapped}}), r"Wrapped has no parameter 'weight': that of 'head.fc'"),
        (policy(quan_policy={"Linear": {"type": Transposed}}), r"has the shape \(6, 4\), that of 'head.fc' \(4, 6\)"),
        (
            policy(special_layers={"layer_name": []}),
            r"special_layers has no key 'layer_name': did you mean 'layers_name'",
        ),
        (policy(special_layers={"layers_name": ["head.fc"], "convert_type": []}), r"1 names in .* and 0 dicts in"),
        (
            policy(special_layers={"layers_name": "head.fc"}),
            r"special_layers needs the list layers_name, not 'head.fc'",
        ),
        (policy(special_layers=7), r"special_layers needs the list layers_name, not None"),
        (
            policy(special_layers={"layers_name": ["head.fcc"], "convert_type": [{"type": "DSQLinear"}]}),
            r"special_layers: the model has no module 'head.fcc': did you mean 'head.fc'",
        ),
        (
            policy(special_layers={"layers_name": ["head.fc"] * 2, "convert_type": [{"type": "DSQLinear"}] * 2}),
            r"special_layers names 'head.fc' twice",
        ),
        (
            policy(
                special_layers={
                    "layers_name": ["backbone.conv2", "backbone.again"],
                    "convert_type": [{"type": "DSQConv"}, {"type": "LSQConv2d"}],
                }
            ),
            r"'backbone.conv2' and 'backbone.again' are one layer",
        ),
        (
            policy(special_layers={"layers_name": ["head.fc"], "convert_type": [{"type": "DSQLinear", "bits": 3}]}),
            r"'head.fc': DSQLinear has no argument 'bits'",
        ),
    ],
)
def test_refusals_leave_the_model_untouched(config, message):
    model = Net()
    model.backbone.conv1.eval()
    model.head.register_forward_hook(lambda *_: None)
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        build_mtransformer(config)(model)
    assert snapshot(model) == before
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())


def test_more_refusals():
    model = Net()
    transformer = build_mtransformer(policy())
    with pytest.raises(UnknownNameError, match=r"exclude_layers: the model has no module 'backbone.conv': did"):
        transformer(model, exclude_layers=["backbone.conv"])
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module, not list"):
        transformer([model])
    special = {"layers_name": ["head.fc"], "convert_type": [{"type": "DSQLinear"}]}
    with pytest.raises(ConfigError, match=r"'head.fc' is in special_layers and in exclude_layers"):
        build_mtransformer(policy(special_layers=special))(model, exclude_layers=["head"])
    nn.utils.parametrizations.weight_norm(model.backbone.conv1)
    with pytest.raises(ConfigError, match=r"'backbone.conv1' has a parametrization: call remove_parametrizations"):
        transformer(model)
    converted = build_mtransformer(policy())(Net())
    with pytest.raises(ConfigError, match="no layer of the model is replaced"):
        transformer(converted)


def test_the_random_numbers_of_the_user_are_not_used_up():
    model = Net()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_mtransformer(policy())(model)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nx = os.system('echo')", r"quant.py:2: 'os.system\('echo'\)' is not allowed: a config is read"),
        ("x = dict(**{'a': 1})", r"quant.py:1: \*\*'\{'a': 1\}' is not allowed in a dict"),
        ("for i in range(3):\n    pass", r"quant.py:1: 'for i in range\(3\): pass' is not allowed"),
        ("x = [\n  1,\n  1 + 1]", r"quant.py:3: '1 \+ 1' is not allowed"),
        ("quant = 1\nx = quantt", r"quant.py:2: the name quantt is set nowhere above .*: did you mean 'quant'"),
        ("x = dict(a=1,\n  b=", r"quant.py:1: this is not Python"),
        ("x = {'a': 1, 'a': 2}", r"quant.py:1: the key 'a' is given twice"),
        ("y = 1\nx = {[1]}", r"quant.py:2: a list, set or dict cannot be a key"),
        ("x = {'a': {(1, [2]): 3}}", r"quant.py:1: a list, set or dict cannot be a key"),
        ("x = __import__('os').name", r"quant.py:1: .* is not allowed"),
        ("x = torch.nn.Conv2d", r"quant.py:1: the name 'torch.nn.Conv2d' is not known in a config"),
        ("x = Qmodes.kernelwise", r"quant.py:1: Qmodes has no 'kernelwise': did you mean 'kernel_wise'"),
        ("_base_ = 'other.py'", r"has '_base_', which is not read"),
    ],
)
def test_configs_are_read_and_not_run(tmp_path, text, message):
    path = tmp_path / "quant.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Config.fromfile(path)


def test_what_a_config_may_have(tmp_path):
    path = tmp_path / "quant.py"
    path.write_text(
        '"""Settings."""\nfrom quantrans.quantops import Qmodes\nbits = 4\n'
        "layer = dict(type='LSQConv2d', num_bit_w=bits, q_mode=Qmodes.kernel_wise, x=(-1, 2.5, None, {3}))\n"
        "quant_transformer = {'quan_policy': {'Conv2d': layer}, 'flag': True}\n"
    )
    cfg = Config.fromfile(path)
    layer = cfg.quant_transformer.quan_policy.Conv2d
    assert layer == {"type": "LSQConv2d", "num_bit_w": 4, "q_mode": Qmodes.kernel_wise, "x": (-1, 2.5, None, {3})}
    with pytest.raises(AttributeError, match="the config has no 'quant_transfomer': did you mean 'quant_transformer'"):
        _ = cfg.quant_transfomer
    cfg.extra = 3
    assert cfg["extra"] == 3
    (tmp_path / "quant.yaml").write_text("quant_transformer: {type: mTransformerV2}")
    assert Config.fromfile(tmp_path / "quant.yaml").quant_transformer.type == "mTransformerV2"
    for name, text in (("list.yaml", "[1]"), ("bad.yaml", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name}' (must be|cannot be)"):
            Config.fromfile(tmp_path / name)
    with pytest.raises(ConfigError, match=r"nothing.py' cannot be read"):
        Config.fromfile(tmp_path / "nothing.py")
