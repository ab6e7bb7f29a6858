"""What prepare refuses before any work."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.nn.weight_sites import weight_sites
from tests.preparation.nets import Small, image


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "onnxrt"}, UnknownNameError, "unknown backend 'onnxrt': did you mean 'onnxruntime'"),
        ({"backend": 3}, ConfigError, "backend must be a name or a Backend, not 3"),
        ({"weight": "nit8"}, ConfigError, "unknown number format 'nit8': did you mean 'int8'"),
        ({"weight": "int16"}, ConfigError, "the recipe: onnxruntime has no weights in int16; it has int2, int3"),
        ({"weight": "int8 affine"}, ConfigError, "onnxruntime needs symmetric weights, not 'int8 affine tensor'"),
        ({"weight": "int4 group:32"}, ConfigError, "onnxruntime has no scales per group"),
        ({"activation": "uint4"}, ConfigError, "the recipe: onnxruntime has no activations in uint4; it has int8, ui"),
        ({"activation": "uint8 channel:1"}, ConfigError, "onnxruntime needs one scale per activation tensor"),
        ({"skip": ["fcc"]}, UnknownNameError, "the rule 'fcc' matches no layer: did you mean 'fc'"),
        ({"skip": ["op:relu6"]}, UnknownNameError, "the rule 'op:relu6' matches no layer: did you mean 'op:relu'"),
        ({"skip": ["re:("]}, ConfigError, "'re:\\(' is not a regular expression"),
        ({"skip": [nn.Linear]}, ConfigError, "rules.0.match: must be text, not <class"),
        ({"recipe": {"rules": [{"match": "fc", "weight": "int16"}]}}, ConfigError, "the rule 'fc': onnxruntime has no"),
        ({"recipe": {"weight": {"observer": "minmx"}}}, UnknownNameError, "unknown observer 'minmx': did you mean"),
        ({"recipe": {"activation": {"method": "Magic"}}}, UnknownNameError, "unknown method 'Magic'"),
        (
            {"recipe": {"activation": {"observer": "ema_minmax", "observer_options": {"ratio": 1}}}},
            ConfigError,
            "the observer 'ema_minmax' has no option 'ratio': did you mean 'ema_ratio'",
        ),
        ({"recipe": "nowhere.yaml"}, ConfigError, "the recipe 'nowhere.yaml' cannot be read"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        bw.prepare(Small(), image(), **options)


def test_what_cannot_be_is_refused_before_any_work():
    class Untouchable(nn.Module):
        def forward(self, x):
            pytest.fail("the model may not run")

    for options in ({"backend": "onnxrt"}, {"weight": "int16"}, {"skip": ["re:("]}, {"recipe": {"bakend": 1}}):
        with pytest.raises(ConfigError):
            bw.prepare(Untouchable(), image(), **options)


def test_a_model_that_was_not_prepared():
    with pytest.raises(ConfigError, match=r"this Linear was not made by bitwright.prepare"):
        bw.ledger_of(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"this Linear was not made by bitwright.prepare"):
        bw.calibrate(nn.Linear(1, 1), [torch.ones(1)])


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("vnni", "expected"), [(True, "int8"), (False, "int7")])
def test_auto_weights_have_the_bits_that_the_cpu_multiplies_safely(
    backend: str, vnni: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for here, weight in ((vnni, "auto"), (not vnni, "auto:vnni" if vnni else "auto:avx2")):  # this CPU, or one said
        monkeypatch.setattr("bitwright.cpu.has_vnni", lambda here=here: here)
        model = bw.prepare(Small().eval(), image(), backend, weight=weight)
        specs = {str(site.quantizer.spec) for site in weight_sites(model)}
        assert specs == {f"{expected} symmetric narrow channel:0"}


def test_auto_weights_are_for_cpus() -> None:
    with pytest.raises(ConfigError, match="weight='auto' is for backends whose weights depend on the CPU"):
        bw.prepare(Small().eval(), image(), "tensorrt", weight="auto")
    with pytest.raises(UnknownNameError, match=r"unknown kind of CPU 'vnn'.*'vnni'"):
        bw.prepare(Small().eval(), image(), "openvino", weight="auto:vnn")
