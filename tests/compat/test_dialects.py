"""One intent in four dialects: the same recipe, the same numbers; and `bitwright recipe convert`."""

import operator
from textwrap import dedent

import pytest
import torch
import yaml
from torch import nn

import bitwright as bw
from bitwright.cli import main
from bitwright.compat import mqbench, quantrans, sparsebit
from bitwright.compat.convert import convert
from bitwright.errors import ConfigError
from bitwright.quantizer import quantizers
from bitwright.recipe import Recipe

FILES = {
    "native.yaml": """
        backend: academic
        weight: {spec: int8 symmetric tensor, observer: LSQObserver, method: LearnableFakeQuantize}
        activation: {spec: int8 symmetric tensor, observer: LSQObserver, method: LearnableFakeQuantize}
        """,
    "sparsebit.yaml": """
        BACKEND: academic
        SCHEDULE: {FUSE_BN: True}
        W: {QSCHEME: per-tensor-symmetric, QUANTIZER: {TYPE: LSQ, BIT: 8}}
        A: {QSCHEME: per-tensor-symmetric, QUANTIZER: {TYPE: LSQ, BIT: 8}}
        """,
    "mqbench.py": """
        from mqbench.prepare_by_platform import BackendType

        backend = BackendType.Academic
        extra_config = {
            'extra_qconfig_dict': {
                'w_observer': 'LSQObserver',
                'a_observer': 'LSQObserver',
                'w_fakequantize': 'LearnableFakeQuantize',
                'a_fakequantize': 'LearnableFakeQuantize',
                'w_qscheme': {'bit': 8, 'symmetry': True, 'per_channel': False, 'pot_scale': False},
                'a_qscheme': {'bit': 8, 'symmetry': True, 'per_channel': False, 'pot_scale': False},
            },
        }
        """,
    "quantrans.py": """
        quant_transformer = dict(
            type="mTransformerV2",
            quan_policy=dict(
                Conv2d=dict(type="LSQConv2d", num_bit_w=8, num_bit_a=8, signed=True),
                Linear=dict(type="LSQLinear", num_bit_w=8, num_bit_a=8, signed=True),
            ),
        )
        """,
}
DIALECTS = dict(zip(FILES, ("Bitwright", "Sparsebit", "MQBench", "QuanTransformer"), strict=True))


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(dedent(text))
    return tmp_path


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(*layers).eval()


def test_one_intent_is_one_recipe(files):
    found = {name: convert(files / name) for name in FILES}
    assert {name: dialect for name, (dialect, _, _) in found.items()} == DIALECTS
    recipes = [recipe for _, recipe, _ in found.values()]
    assert recipes == [recipes[0]] * 4
    assert Recipe.parse(recipes[0].to_yaml()) == recipes[0]


def test_one_intent_gives_the_same_numbers(files, model):
    batches = [torch.randn(4, 3, 8, 8) * i for i in (1, 2)]
    x = batches[0]

    native = bw.calibrate(bw.prepare(model, x, recipe=files / "native.yaml"), batches)

    sparse = sparsebit.QuantModel(model, files / "sparsebit.yaml")
    sparse.prepare_calibration()
    for batch in batches:
        sparse(batch)
    sparse.calc_qparams()
    sparse.set_quant(w_quant=True, a_quant=True)

    config = quantrans.Config.fromfile(files / "quantrans.py")
    transformed = quantrans.build_mtransformer(config.quant_transformer)(torch.nn.Sequential(*model))
    quan = bw.calibrate(bw.prepare(transformed, x, "academic", weight="int8", activation="int8"), batches)

    qconfig = {
        **{f"{letter}_observer": "LSQObserver" for letter in "wa"},
        **{f"{letter}_fakequantize": "LearnableFakeQuantize" for letter in "wa"},
        **{f"{letter}_qscheme": {"bit": 8, "symmetry": True} for letter in "wa"},
    }
    mq = mqbench.prepare_by_platform(model, mqbench.BackendType.Academic, {"extra_qconfig_dict": qconfig})
    mqbench.enable_calibration(mq)
    for batch in batches:
        mq(batch)
    mqbench.enable_quantization(mq)

    expected = native(x)
    assert not torch.equal(expected, model(x))
    for made in (sparse, quan, mq):
        assert torch.equal(made(x), expected)


def test_rules_of_the_dialects_agree(tmp_path):
    native = {
        "backend": "tensorrt",
        "weight": {"spec": "int8 symmetric channel:0", "observer": "MinMaxObserver", "method": "FixedFakeQuantize"},
        "activation": {"spec": "int8 symmetric tensor", "observer": "MSEObserver", "method": "FixedFakeQuantize"},
        "rules": [{"match": "op:add", "skip": True, "optional": True}, {"match": "head.fc", "skip": True}],
    }
    off = [{"head.fc": ["QUANTIZER.DISABLE", True]}]
    sparse = {
        "BACKEND": "tensorrt",
        "SCHEDULE": {"FUSE_BN": True},
        "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"BIT": 8}, "SPECIFIC": off},
        "A": {
            "QSCHEME": "per-tensor-symmetric",
            "QUANTIZER": {"BIT": 8},
            "OBSERVER": {"TYPE": "mse"},
            "SPECIFIC": off,
        },
    }
    mq = {
        "extra_qconfig_dict": {
            **{"w_observer": "MinMaxObserver", "a_observer": "MSEObserver"},
            **{f"{letter}_fakequantize": "FixedFakeQuantize" for letter in "wa"},
            **{"w_qscheme": {"per_channel": True}, "a_qscheme": {}},
        },
        "extra_quantizer_dict": {"exclude_module_name": ["head.fc"], "exclude_function_type": [operator.add]},
    }
    assert sparsebit.to_recipe(sparse)[0] == Recipe.parse(native)
    found = mqbench.to_recipe(mq, "Tensorrt")[0]
    assert found.model_copy(update={"rules": found.rules[::-1]}) == Recipe.parse(native)


def test_quantransformers_layers_as_rules(model):
    config = {
        "type": "mTransformerV2",
        "quan_policy": {
            "Conv2d": {"type": "LSQPlusConv2d", "num_bit_w": 3, "num_bit_a": 5},
            "Linear": {"type": "DRFLinear", "num_bit_a": 32},
        },
        "special_layers": {
            "layers_name": ["0", "2"],
            "convert_type": [
                {"type": "EightBitQuantConv", "q_mode": quantrans.Qmodes.kernel_wise},
                {"type": "DSQConv", "bSetQ": False},
            ],
        },
    }
    recipe, notes = quantrans.to_recipe(config)
    assert (recipe.backend, recipe.weight.spec, recipe.activation.spec) == ("academic", "float", "float")
    assert [rule.to_data() for rule in recipe.rules] == [
        {
            "match": "type:Conv2d",
            "optional": True,
            "weight": {
                "spec": "int3 symmetric tensor",
                "observer": "LSQPlusObserver",
                "method": "LSQPlusFakeQuantize",
                "method_options": {"use_grad_scaling": True},
            },
            "input": {
                "spec": "uint5 affine tensor",
                "observer": "LSQPlusObserver",
                "method": "LSQPlusFakeQuantize",
                "method_options": {"use_grad_scaling": True},
            },
        },
        {
            "match": "type:Linear",
            "optional": True,
            "weight": {
                "spec": "int4 symmetric tensor",
                "observer": "MinMaxObserver",
                "method": "DoReFaFakeQuantize",
                "method_options": {"normalize": True},
            },
            "input": "float",
        },
        {
            "match": "0",
            "weight": {
                "spec": "int8 symmetric narrow channel:0",
                "observer": "MinMaxObserver",
                "method": "FixedFakeQuantize",
            },
            "input": "float",
        },
        {"match": "2", "skip": True},
    ]
    assert notes == ["0: EightBitQuantConv finds the range of the weight again in each training step"]
    made = bw.prepare(model, torch.randn(1, 3, 8, 8), recipe=recipe)
    assert {n: str(q.spec) for n, q in quantizers(made).items()} == {
        "0._weight_quantizer": "int8 symmetric narrow channel:0",
        "5._weight_quantizer": "int4 symmetric tensor",
    }


def test_layers_of_ones_own_have_no_recipe():
    class Mine(nn.Conv2d):
        pass

    recipe, notes = quantrans.to_recipe({"type": "QuanTransformer", "quan_policy": {"Conv2d": {"type": Mine}}})
    assert recipe.rules[0].skip
    assert notes == ["type:Conv2d: Mine is your own code; the recipe leaves these layers float"]


def test_convert_prints_a_recipe(files, capsys):
    for name in FILES:
        assert main(["recipe", "convert", str(files / name)]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"# {name}: {DIALECTS[name]}\n")
        assert Recipe.parse(out) == Recipe.parse(files / "native.yaml")
        assert ("no equivalent" in err) == (name == "quantrans.py")
    assert main(["recipe", "convert", str(files / "mqbench.py"), "--json"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["dialect"] == "MQBench"


SEED = """
import operator
import torch
import torch.nn as nn
import mqbench.nn as qnn
from mqbench.fuser_method_mappings import fuse_linear_bn, ConvBNReLUFusion
from mine.nets import Backbone, fuse_scale

extra_config = {
    'extra_qconfig_dict': {'w_qscheme': {'bit': 4}, 'a_qscheme': {'bit': 4, 'symmetry': False}},
    'extra_quantizer_dict': {
        'additional_function_type': [operator.add,],
        'additional_module_type': (torch.nn.Upsample),
        'additional_node_name': ['layer1_1_conv1'],
        'exclude_module_name': ['layer2.1.relu',],
        'exclude_function_type': [operator.mul,],
        'exclude_node_name': ['layer1_1_conv1'],
    },
    'preserve_attr': {'': ["func1"], 'backbone': ['func2']},
    'extra_fuse_dict': {
        'additional_fuser_method_mapping': {(torch.nn.Linear, torch.nn.BatchNorm1d): fuse_linear_bn},
        'additional_fusion_pattern': {(torch.nn.BatchNorm1d, torch.nn.Linear): ConvBNReLUFusion},
        'additional_qat_module_mapping': {nn.ConvTranspose2d: qnn.qat.ConvTranspose2d},
    },
    'concrect_args': {'double': True},
    'leaf_module': [nn.LSTM],
}
"""


def test_the_seeds_config_as_a_file(tmp_path, capsys):
    path = tmp_path / "seed.py"
    path.write_text(SEED)
    assert main(["recipe", "convert", str(path)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == {
        "backend": "academic",
        "weight": "int4 symmetric tensor",
        "activation": "uint4 affine tensor",
        "rules": [
            {"match": "type:ConvTranspose2d", "force": True, "optional": True},
            {"match": "op:add", "force": True, "optional": True},
            {"match": "type:Upsample", "force": True, "optional": True},
            {"match": "layer2.1.relu", "skip": True},
            {"match": "op:mul", "skip": True, "optional": True},
            {"match": "node:layer1_1_conv1", "skip": True},
            {"match": "node:layer1_1_conv1", "force": True},
        ],
        "leaves": ["type:torch.nn.modules.rnn.LSTM"],
    }
    keys = (
        "extra_fuse_dict: the methods that fuse Linear+BatchNorm1d are code",
        "additional_qat_module_mapping",
        "preserve_attr",
        "concrete_args",
        "backend",
    )
    for key in keys:
        assert key in err


def test_mqbench_as_yaml(tmp_path):
    data = {
        "backend": "Tensorrt",
        "extra_quantizer_dict": {
            "additional_module_type": ["torch.nn.Upsample", "mine.nets.Gate"],
            "exclude_function_type": ["operator.add", "mean", "mine.nets.shift"],
        },
        "extra_fuse_dict": {
            "additional_fuser_method_mapping": {"torch.nn.Conv2d, mine.nets.Gate": "mine.fuse"},
            "additional_qat_module_mapping": {"torch.nn.Conv2d": "mqbench.nn.qat.Conv2d"},
        },
        "leaf_module": ["mine.nets.Gate"],
    }
    path = tmp_path / "mq.yaml"
    path.write_text(yaml.safe_dump(data))
    dialect, recipe, notes = convert(path)
    assert (dialect, recipe.backend) == ("MQBench", "tensorrt")
    assert [r.match for r in recipe.rules] == [
        *("type:Conv2d", "type:Upsample", "type:Gate"),
        *("op:add", "op:mean", "op:shift"),
    ]
    assert recipe.leaves == ("type:mine.nets.Gate",)
    assert notes == [
        "extra_fuse_dict: the methods that fuse Conv2d+Gate are code; prepare_by_platform runs them",
        "additional_qat_module_mapping: register_qmodule the classes for Conv2d",
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "BACKND: virtual", r"is not a config of a known dialect: 'BACKND': did you mean 'backend'"),
        ("a.yaml", "[1]", r"must be a mapping of settings, not \[1\]"),
        ("a.yaml", "", r"must be a mapping of settings, not None"),
        ("a.json", "{", r"cannot be read"),
        ("a.py", "extra_config = dict(extra_qconfg_dict={}, leaf_module=[])", r"did you mean 'extra_qconfig_dict'"),
        (
            "a.py",
            "extra_config = dict(leaf_module=[torch.nn.Upsampel])",
            r"a.py:1: torch.nn has no 'Upsampel': did you",
        ),
        (
            "a.py",
            "extra_config = dict(leaf_module=[operatr.add])",
            r"a.py:1: the name 'operatr.add' is not known: did",
        ),
        ("a.py", "extra_config = dict(leaf_module=[BackendType.X])", r"a.py:1: BackendType has no 'X'"),
        ("a.py", "extra_config = open('x')", r"a.py:1: 'open\('x'\)' is not allowed"),
    ],
)
def test_files_that_are_refused(tmp_path, capsys, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert(path)
    assert main(["recipe", "convert", str(path)]) == 2
    assert capsys.readouterr().err.startswith("bitwright: ")
