"""What Sparsebit's configs and QuantModel refuse, and how."""

import copy

import pytest
import torch

from bitwright.compat.sparsebit import QuantModel, parse_qconfig
from bitwright.errors import CalibrationError, ConfigError
from tests.compat.sparsebit.nets import YAML


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BACKND": "virtual"}, r"the config has no key 'BACKND': did you mean 'BACKEND'"),
        ({"BACKEND": "tensort"}, r"unknown backend 'tensort': did you mean 'tensorrt'"),
        ({"BACKEND": 3}, r"BACKEND must be the name of a target, not 3"),
        ({"W": {"QUANTIZER": {"BITS": 8}}}, r"W.QUANTIZER has no key 'BITS': did you mean 'BIT'"),
        ({"W": {"QUANTIZER": {"PACT": {}}}}, r"W.QUANTIZER has no key 'PACT'"),
        ({"W": {"QUANTIZER": 8}}, r"W.QUANTIZER must be a mapping of settings, not 8"),
        ({"W": {"QUANTIZER": {"BIT": "8"}}}, r"W.QUANTIZER.BIT must be a number of bits, not '8'"),
        ({"W": {"QUANTIZER": {"DISABLE": "no"}}}, r"W.QUANTIZER.DISABLE must be True or False, not 'no'"),
        ({"W": {"QUANTIZER": {"TYPE": "lqs"}}}, r"W.QUANTIZER.TYPE: unknown type 'lqs': did you mean 'lsq'"),
        ({"A": {"OBSERVER": {"TYPE": "MINMX"}}}, r"A.OBSERVER.TYPE: unknown type 'MINMX': did you mean 'minmax'"),
        ({"A": {"QSCHEME": "per-tensr-affine"}}, r"A.QSCHEME: unknown scheme .* did you mean 'per-tensor-affine'"),
        (
            {"A": {"QSCHEME": "per-channel-affine", "OBSERVER": {"LAYOUT": "NHWC"}}},
            r"A.OBSERVER.LAYOUT: unknown layout 'NHWC': did you mean 'NCHW'",
        ),
        (
            {"SCHEDULE": {"FUSE_BATCHNORM": True}},
            r"SCHEDULE has no key 'FUSE_BATCHNORM': did you mean .*FOLD_BATCHNORM",
        ),
        ({"SCHEDULE": {"FUSE_BN": 1}}, r"SCHEDULE.FUSE_BN must be True or False, not 1"),
        ({"A": {"QADD": {"ENABLE": True}}}, r"A.QADD has no key 'ENABLE': did you mean 'ENABLE_QUANT'"),
        ({"W": {"SPECIFIC": {"first": []}}}, r"W.SPECIFIC must be a list of mappings"),
        ({"W": {"SPECIFIC": ["first"]}}, r"W.SPECIFIC must hold mappings from names to lists of settings, not 'first'"),
        (
            {"W": {"SPECIFIC": [{"first": ["QUANTIZER.BIT"]}]}},
            r"W.SPECIFIC\['first'\] must be a list of keys and values",
        ),
        (
            {"W": {"SPECIFIC": [{"first": ["QUANTIZER.BITS", 4]}]}},
            r"W.SPECIFIC\['first'\] has no key 'BITS': did you mean 'BIT'",
        ),
        (
            {"W": {"SPECIFIC": [{"firstt": ["QUANTIZER.BIT", 4]}]}},
            r"the rule 'firstt' matches no.*did you mean 'first'",
        ),
        ({"W": {"SPECIFIC": [{"blocks_0_cnv": ["QUANTIZER.BIT", 4]}]}}, r"matches no.*did you mean 'blocks.0.conv'"),
        (
            {"W": {"SPECIFIC": [{"blcks*": ["QUANTIZER.BIT", 4]}]}, "A": {"SPECIFIC": [{"*": ["QUANTIZER.BIT", 4]}]}},
            r"W.SPECIFIC: 'blcks\*' fits no layer: did you mean",
        ),
        ({"SKIP_TRACE_MODULES": ["blcks"]}, r"'blcks'.*did you mean 'blocks'"),
    ],
)
def test_refusals_leave_the_model_untouched(model, x, changes, message):
    model.blocks.train()
    before = {n: (m, m.training) for n, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        QuantModel(model, {"SCHEDULE": {"FUSE_BN": True}, **changes})(x)
    assert {n: (m, m.training) for n, m in model.named_modules()} == before
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())


def test_more_refusals(model, x, tmp_path):
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module, not list"):
        QuantModel([], YAML)
    with pytest.raises(ConfigError, match=r"the config must be a mapping of settings"):
        parse_qconfig("a\nb")
    with pytest.raises(ConfigError, match=r"nothing.yaml' cannot be read"):
        parse_qconfig(tmp_path / "nothing.yaml")
    qmodel = QuantModel(model, YAML)
    with pytest.raises(CalibrationError, match=r"has no range yet"):
        qmodel.set_quant(True, True)
    with pytest.raises(CalibrationError, match=r"there is no calibration data"):
        qmodel.calc_qparams()
    qmodel.prepare_calibration()
    with pytest.raises(CalibrationError, match=r"there is no calibration data"):
        qmodel.calc_qparams()
