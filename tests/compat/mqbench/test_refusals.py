"""What MQBench's prepare_by_platform refuses, and how."""

import pytest
import torch.nn.functional as F
from torch import nn

from bitwright.compat.mqbench import (
    ConvBNReLUFusion,
    enable_calibration,
    prepare_by_platform,
)
from bitwright.errors import ConfigError, UnknownNameError
from tests.compat.mqbench.nets import ACADEMIC, SEED, Scale, config, fuse_scale, prepared, same, snapshot

BAD = [
    (config(extra_qconfig={}), r"extra_config has no key 'extra_qconfig': did you mean 'extra_qconfig_dict'"),
    (config(extra_qconfig_dict={"w_observr": "MSEObserver"}), r"no key 'w_observr': did you mean 'w_observer'"),
    (config(extra_qconfig_dict={"w_observer": "EMAMinMax"}), r"unknown observer 'EMAMinMax': did you mean 'EMAMinMaxO"),
    (
        config(extra_qconfig_dict={"a_fakequantize": "Fixed"}),
        r"unknown method 'Fixed': did you mean 'FixedFakeQuantize'",
    ),
    (config(extra_qconfig_dict={"a_observer": 3}), r"a_observer must be a name in quotes, not 3"),
    (config(extra_qconfig_dict={"w_qscheme": {"bit": "8"}}), r"w_qscheme: bit must be a number of bits, not '8'"),
    (config(extra_qconfig_dict={"w_qscheme": {"symmetry": 1}}), r"w_qscheme: symmetry must be True or False, not 1"),
    (config(extra_qconfig_dict={"w_qscheme": 8}), r"w_qscheme must be a mapping of settings, not 8"),
    (config(extra_qconfig_dict={"w_fakeq_params": 8}), r"w_fakeq_params must be a mapping of settings, not 8"),
    (
        config(extra_qconfig_dict={"a_qscheme": {"symmetry": False, "symmetric_range": True}}),
        r"a_qscheme: symmetric_range is for symmetric schemes",
    ),
    (
        config(extra_qconfig_dict={**ACADEMIC["extra_qconfig_dict"], "a_observer_extra_args": {"ema_ration": 0.5}}),
        r"has no option 'ema_ration': did you mean 'ema_ratio'",
    ),
    (config(extra_quantizer_dict={"exclude_modul_name": []}), r"no key 'exclude_modul_name': did you mean 'exclude_mo"),
    (
        config(extra_quantizer_dict={"exclude_module_name": ["layer1.1.conv3", "hed"]}),
        r"exclude_module_name: the model has no module 'layer1.1.conv3': did you mean 'layer1.1.conv.*; .*'hed'",
    ),
    (
        config(extra_quantizer_dict={"exclude_node_name": ["layer1_1_conv3"]}),
        r"'node:layer1_1_conv3' matches no.*conv1",
    ),
    (config(extra_quantizer_dict={"additional_node_name": ["sigmoi"]}), r"'node:sigmoi' matches no.*'node:sigmoid'"),
    (
        config(extra_quantizer_dict={"additional_node_name": [3]}),
        r"additional_node_name must hold names in quotes, not 3",
    ),
    (
        config(extra_quantizer_dict={"additional_module_type": "Upsample"}),
        r"must hold module classes such as torch.nn.Upsamp",
    ),
    (
        config(extra_quantizer_dict={"exclude_function_type": [nn.ReLU]}),
        r"must hold functions such as operator.add, not",
    ),
    (config(extra_quantizer_dict={"exclude_node_name": {"a": 1}}), r"exclude_node_name must be a list, not"),
    (
        config(preserve_attr={"": ["func3"]}),
        r"the model \(Net\) has no attribute 'func3' to preserve: did you mean 'func1'",
    ),
    (
        config(preserve_attr={"bakbone": ["func2"]}),
        r"preserve_attr names the module 'bakbone', .*: did you mean 'backbone'",
    ),
    (config(preserve_attr=["func1"]), r"preserve_attr must be a mapping of settings, not"),
    (config(extra_fuse_dict={"additional_fusion_patterns": {}}), r"did you mean 'additional_fusion_pattern'"),
    (
        config(extra_fuse_dict={"additional_fusion_pattern": {(Scale, nn.Conv2d): ConvBNReLUFusion}}),
        r"no method fuses \(",
    ),
    (
        config(extra_fuse_dict={"additional_fusion_pattern": {(Scale, nn.Conv2d): 3}}),
        r"needs ConvBNReLUFusion, a class",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {F.relu: fuse_scale}}),
        r"a key must be a tuple of module cl",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {nn.Conv2d: 3}}),
        r"\(Conv2d\) needs a function of the",
    ),
    (
        config(extra_fuse_dict={"additional_qat_module_mapping": {nn.Conv2d: 3}}),
        r"must map module classes to module classes",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {(nn.Conv2d, nn.BatchNorm2d): lambda a, b: None}}),
        r"<lambda> must return the module that layer1.0.conv1, layer1.0.bn1 become, not None",
    ),
    (
        config(extra_fuse_dict={"additional_fuser_method_mapping": {(nn.Conv2d, nn.BatchNorm2d): fuse_scale}}),
        r"fuse_scale cannot fuse layer1.0.conv1, layer1.0.bn1: AttributeError",
    ),
    (config(leaf_module=[3]), r"leaf_module must hold module classes, not 3"),
    (config(leaf_module=[Scale]), r"the leaf 'type:.*Scale' is not a module of the model"),
    (config(concrete_args=[3]), r"concrete_args must be a mapping"),
    (config(concrete_args={"a": 1}, concrect_args={"a": 1}), r"both concrete_args and concrect_args"),
    ([], r"extra_config must be a mapping of settings, not \[\]"),
]


@pytest.mark.parametrize(("extra_config", "message"), BAD)
@pytest.mark.parametrize("lazy", [True, False])
def test_refusals_leave_the_model_untouched(model, x, extra_config, message, lazy):
    model.layer2.train()
    model.fc.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        prepare_by_platform(model, "Academic", extra_config, example_inputs=None if lazy else x)(x)
    assert same(before, snapshot(model))


def test_more_refusals(model, x):
    with pytest.raises(UnknownNameError, match=r"unknown BackendType 'Tensort': did you mean 'Tensorrt'"):
        prepare_by_platform(model, "Tensort")
    with pytest.raises(ConfigError, match=r"the backend must be a BackendType or its name, not 3"):
        prepare_by_platform(model, 3)
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module, not list"):
        prepare_by_platform([], "Tensorrt")
    with pytest.raises(ConfigError, match=r"tensorrt has no weights in uint8"):
        prepare_by_platform(model, "Tensorrt", SEED)
    made = prepared(model, x)
    with pytest.raises(ConfigError, match=r"prepared already"):
        prepare_by_platform(made, "Tensorrt")
    with pytest.raises(ConfigError, match=r"this Net has no quantizer: prepare it first"):
        enable_calibration(model)
    with pytest.raises(ConfigError, match=r"custom_tracer must be an fx.Tracer with is_leaf_module, not 3"):
        prepare_by_platform(model, "Tensorrt", custom_tracer=3)
