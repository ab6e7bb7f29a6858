"""Sparsebit's configs: an effect of every key."""

import pytest
import torch

import bitwright as bw
from bitwright.compat.sparsebit import QuantModel, parse_qconfig, to_recipe
from bitwright.quantizer import quantizers
from tests.compat.sparsebit.nets import config, first_input, made, verdicts


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *[(n, "LearnableFakeQuantize") for n in ("LSQ", "lsq")],
        *[(n, "LSQPlusFakeQuantize") for n in ("lsq+", "LSQ_plus")],
        *[("DoReFa", "DoReFaFakeQuantize"), ("dorefa", "DoReFaFakeQuantize"), ("uniform", "FixedFakeQuantize")],
        *[("pact", "PACTFakeQuantize"), ("AdaRound", "AdaRoundFakeQuantize"), ("DSQFakeQuantize", "DSQFakeQuantize")],
    ],
)
def test_quantizers_by_name(model, x, name, method):
    weight = "uniform" if method.startswith("PACT") else name
    found = made(model, x, W__QUANTIZER__TYPE=weight, A__QUANTIZER__TYPE=name)
    assert first_input(found).method_name == method
    assert found.fc.weight_quantizer.method_name == ("FixedFakeQuantize" if weight == "uniform" else method)


@pytest.mark.parametrize(
    ("name", "observer"),
    [
        *[(n, "MinMaxObserver") for n in ("MINMAX", "minmax")],
        *[("percentile", "PercentileObserver"), ("mse", "MSEObserver"), ("MSE", "MSEObserver")],
        *[("moving_average", "EMAMinMaxObserver"), ("KL_HISTOGRAM", "KLObserver"), ("aciq", "ACIQObserver")],
        ("EMAQuantileObserver", "EMAQuantileObserver"),
    ],
)
def test_observers_by_name(model, x, name, observer):
    found = made(model, x, W__OBSERVER__TYPE=name, A__OBSERVER__TYPE=name)
    assert first_input(found).observer_name == found.fc.weight_quantizer.observer_name == observer


def test_lsq_begins_as_in_its_paper_unless_told_otherwise(model, x):
    lsq = {"W__QUANTIZER__TYPE": "lsq", "A__QUANTIZER__TYPE": "lsq+"}
    found = made(model, x, **lsq)
    assert found.fc.weight_quantizer.observer_name == "LSQObserver"
    assert first_input(found).observer_name == "MinMaxObserver"
    found = made(model, x, **lsq, W__OBSERVER__TYPE="MSE")
    assert found.fc.weight_quantizer.observer_name == "MSEObserver"


def test_arguments_of_observers_and_quantizers(model, x):
    changes = {
        "W__OBSERVER__TYPE": "percentile",
        "W__OBSERVER__PERCENTILE": {"ALPHA": 0.01},
        "A__OBSERVER__TYPE": "MOVING_AVERAGE",
        "A__OBSERVER__MOVING_AVERAGE": {"EMA_RATIO": 0.5},
        "A__QUANTIZER__TYPE": "PACT",
        "A__QUANTIZER__PACT": {"ALPHA_VALUE": 7},
    }
    found = made(model, x, **changes)
    assert found.fc.weight_quantizer.observer.percentile == 99
    assert first_input(found).observer.ema_ratio == 0.5
    bw.calibrate(found, [x])
    assert float(first_input(found).method.alpha.detach()) == 7
    found = made(model, x, A__OBSERVER__TYPE="ACIQ", A__OBSERVER__ACIQ={"DISTRIBUTION": "LAPLACE"})
    assert first_input(found).observer.distribution == "laplace"
    found = made(model, x, W__OBSERVER__TYPE="PERCENTILE", A__OBSERVER__PERCENTILE={"ALPHA": 0.1})
    assert found.fc.weight_quantizer.observer.percentile == 99.9


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("grain", ["tensor", "channel"])
@pytest.mark.parametrize(("scheme", "format"), [("symmetric", "int"), ("affine", "uint")])
def test_schemes(model, x, bits, grain, scheme, format):
    changes = {f"{kind}__{key}": v for kind in "WA" for key, v in (("QSCHEME", f"per-{grain}-{scheme}"),)}
    found = made(model, x, **changes, W__QUANTIZER__BIT=bits, A__QUANTIZER__BIT=bits)
    axis = {"tensor": ("tensor", "tensor"), "channel": ("channel:0", "channel:1")}[grain]
    assert str(found.fc.weight_quantizer.spec) == f"{format}{bits} {scheme} {axis[0]}"
    assert str(first_input(found).spec) == f"{format}{bits} {scheme} {axis[1]}"
    last = to_recipe(config(**changes, A__OBSERVER__LAYOUT="NLC"))[0]
    assert str(last.activation.spec.granularity) == ("tensor" if grain == "tensor" else "channel:2")


def test_what_is_left_out_is_the_backends(model, x):
    recipe, _ = to_recipe({"BACKEND": "tensorrt", "W": {"QUANTIZER": {"BIT": 4}}, "SCHEDULE": {"FUSE_BN": True}})
    assert (recipe.weight.bits, recipe.weight.spec, recipe.activation.spec) == (4, None, None)
    assert str(to_recipe({"A": {"QSCHEME": "per-tensor-affine"}})[0].activation.spec) == "uint8 affine tensor"


def test_switching_off(model, x):
    found = made(model, x, W__QUANTIZER__DISABLE=True)
    assert [n for n in quantizers(found) if "_weight_quantizer" in n] == []
    assert first_input(found)
    found = made(model, x, A__QUANTIZER__DISABLE=True)
    assert all("_weight_quantizer" in n for n in quantizers(found))


def test_sums(model, x):
    assert [verdicts(made(model, x, A__QADD__ENABLE_QUANT=on))["add"] for on in (True, False)] == ["integer", "float"]
    forced = QuantModel(model, config(BACKEND="academic", A__QADD__ENABLE_QUANT=True), x).model
    assert verdicts(forced)["add"] == "integer"


def test_fusing_batch_norms(model, x):
    fused, apart = (made(model, x, SCHEDULE__FUSE_BN=on) for on in (True, False))
    assert fused.blocks[0].conv.folded_norm is fused.blocks[0].norm1
    assert apart.blocks[0].conv.folded_norm is None
    assert torch.equal(apart(x), model(x))


def test_custom_schedules_are_switched_by_name():
    for on in (True, False):
        recipe, _ = to_recipe({"SCHEDULE": {"FUNCTIONALIZE": on, "FUSE_BN": True}})
        assert recipe.schedules == {"functionalize": on}


def test_modules_that_are_not_traced(model, x):
    found = made(model, x, SKIP_TRACE_MODULES=["blocks.*"])
    assert "blocks.0" in verdicts(found)
    assert verdicts(found)["first"] == "integer"
    assert torch.equal(found(x), model(x))


def test_what_has_no_equivalent_is_said(model):
    changes = {"SCHEDULE__BN_TUNING": True, "SCHEDULE__DISABLE_UNNECESSARY_QUANT": False, "DEVICE": "cpu"}
    _, notes = to_recipe(config(**changes))
    starts = ["SCHEDULE.DISABLE_UNNECESSARY_QUANT", "SCHEDULE.BN_TUNING", "DEVICE"]
    assert [note.split(":")[0] for note in notes] == starts
    assert to_recipe(config())[1] == []


def test_the_device(model, x):
    qmodel = QuantModel(model, config(DEVICE="meta"))
    assert {p.device.type for p in qmodel.parameters()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_names_under_the_old_root():
    from bitwright.compat.sparsebit import quantization
    from bitwright.compat.sparsebit.quantization import converters, modules

    assert (quantization.QuantModel, quantization.parse_qconfig) == (QuantModel, parse_qconfig)
    assert modules.QMODULE_MAP is bw.nn.QMODULES
    assert converters.MatcherNode is bw.MatcherNode
