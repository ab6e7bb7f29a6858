"""Sparsebit's configs and QuantModel: an effect of every key, the flow, and what is refused."""

import copy
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import bitwright as bw
from bitwright.compat.sparsebit import QuantModel, parse_qconfig, to_recipe
from bitwright.errors import CalibrationError, ConfigError
from bitwright.preparation import ledger_of
from bitwright.quantizer import Mode, quantizers
from bitwright.recipe import RuleTarget

YAML = """
BACKEND: virtual
SCHEDULE:
  FUSE_BN: True
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
A:
  QSCHEME: per-tensor-affine
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return F.relu(self.norm1(self.conv(x))) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.first(x)).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)


def config(**changes):
    made = parse_qconfig(YAML)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for part in parents:
            place = place[part]
        place[last] = value
    return made


def made(model, x, **changes):
    return QuantModel(model, config(**changes), example_inputs=x).model


def verdicts(model):
    return {e.name: e.verdict.value for e in ledger_of(model).entries}


def first_input(model):
    return quantizers(model)["bitwright.quantizers.x"]


@pytest.mark.parametrize("lazy", [True, False])
def test_the_flow(model, x, lazy, tmp_path):
    path = tmp_path / "qconfig.yaml"
    path.write_text(YAML)
    qmodel = QuantModel(model, parse_qconfig(path), *([] if lazy else [x]))
    qmodel.prepare_calibration()
    for batch in (x, 1.5 * x):
        assert torch.equal(qmodel(batch), model(batch))
    qmodel.calc_qparams()
    assert torch.equal(qmodel(x), model(x))
    qmodel.set_quant(w_quant=True, a_quant=True)
    reference = bw.calibrate(bw.prepare(model, x, recipe=to_recipe(path)[0]), [x, 1.5 * x])
    assert torch.equal(qmodel(x), reference(x))
    assert not torch.equal(qmodel(x), model(x))
    qmodel.set_quant(w_quant=True)
    assert {q.mode for n, q in quantizers(qmodel).items() if n.endswith("_weight_quantizer")} == {Mode.QUANTIZE}
    assert first_input(qmodel.model).mode is Mode.OFF
    qmodel.set_quant(a_quant=True)
    assert first_input(qmodel.model).mode is Mode.QUANTIZE
    assert qmodel.model.fc.weight_quantizer.mode is Mode.OFF


def test_training(model, x):
    qmodel = QuantModel(model, config(W__QUANTIZER__TYPE="LSQ", A__QUANTIZER__TYPE="lsq"))
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    qmodel.train()
    optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01)
    target = torch.randn(4, 5)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(qmodel(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert qmodel.model.fc.weight_quantizer.method.scale.grad.abs().sum() > 0


def test_calibrating_on_quantized_inputs(model, x):
    low = {"W__QUANTIZER__BIT": 2, "A__QUANTIZER__BIT": 2}
    scales = {}
    for asym in (False, True):
        qmodel = QuantModel(model, config(**low))
        qmodel.prepare_calibration()
        qmodel(x)
        qmodel(2 * x)
        qmodel.calc_qparams(asym=asym)
        qmodel.set_quant(True, True)
        scales[asym] = {
            n: q.scale for n, q in quantizers(qmodel.model).items() if n.startswith("bitwright.quantizers.")
        }
    names = list(scales[True])
    assert torch.equal(scales[True][names[0]], scales[False][names[0]])  # nothing before it
    assert any(not torch.equal(scales[True][n], scales[False][n]) for n in names[1:])
    # The last range is that of the values that come in when all before is quantized.
    last = qmodel.model.fc.input_quantizer
    seen = []
    last.quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for batch in (x, 2 * x):
        qmodel(batch)
    values = torch.cat(seen)
    spread = (values.max().clamp(min=0) - values.min().clamp(max=0)) / 3
    assert torch.allclose(last.scale, spread, rtol=1e-5)
    alone = QuantModel(model, config(**low))
    alone.prepare_calibration()
    alone(x)
    alone(2 * x)
    alone.calc_qparams(asym=True, w_quant=False, a_quant=False)
    found = {n: q.scale for n, q in quantizers(alone.model).items() if n.startswith("bitwright.quantizers.")}
    assert all(torch.equal(found[n], s) for n, s in scales[False].items())


def test_errors_of_layers(model, x):
    qmodel = QuantModel(model, config(A__QUANTIZER__BIT=4), x)
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    modes = {n: q.mode for n, q in quantizers(qmodel).items()}
    alone = qmodel.get_quantization_error(x)
    together = qmodel.get_quantization_error(x, is_async=False)
    assert {n: q.mode for n, q in quantizers(qmodel).items()} == modes
    assert list(alone)[:2] == ["first", "blocks.0.conv"]
    assert torch.equal(alone["first"], together["first"])  # its input is the model's
    fc = qmodel.model.fc
    with torch.no_grad():
        seen = {}
        handle = fc.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        qmodel(x)
        handle.remove()
        fc.input_quantizer.quantizer.quantize(), fc.weight_quantizer.quantize()
        want = F.mse_loss(fc(fc.input_quantizer.quantizer(seen["x"])), model(x))
    assert torch.allclose(alone["fc"], want)
    qmodel.set_quant(True, True)
    assert torch.allclose(together["fc"], F.mse_loss(qmodel(x), model(x)))
    assert qmodel.get_quantization_error(x, checker=lambda a, b: "mine")["fc"] == "mine"


def test_export(model, x, tmp_path):
    pytest.importorskip("onnxruntime")
    qmodel = QuantModel(model, config(BACKEND="onnxruntime", A__QADD__ENABLE_QUANT=True, W__QUANTIZER__BIT=7))
    with pytest.raises(CalibrationError, match=r"nothing is quantized"):
        qmodel.export_onnx(x, tmp_path / "q.onnx")
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.init_QAT()
    for axes, batch in ((None, 4), ({"x": {0: "batch"}}, 3)):
        path = qmodel.export_onnx(x, tmp_path / "q.onnx", dynamic_axes=axes)
        out = bw.run_file(path)(x[:batch])
        assert (out - qmodel(x[:batch])).abs().max() < 0.05 * qmodel(x).abs().max()
    path = qmodel.export_onnx(x, tmp_path / "named.onnx", input_names=["image"], output_names=["score"])
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert torch.equal(
        torch.from_numpy(session.run(["score"], {"image": x.numpy()})[0]), bw.run_file(tmp_path / "q.onnx")(x)
    )
    with pytest.raises(ConfigError, match=r"input_names has 2 names, the model 1 inputs"):
        qmodel.export_onnx(x, path, input_names=["a", "b"])
    with pytest.raises(ConfigError, match=r"opset_version must be at most 21, not 22"):
        qmodel.export_onnx(x, tmp_path / "q.onnx", opset_version=22)


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


def test_specific_layers(model, x):
    changes = {
        "W__SPECIFIC": [
            {"first": ["QUANTIZER.BIT", 4, "OBSERVER.TYPE", "MSE"], "blocks_0_*": ["QUANTIZER.BIT", 5]},
            {"blocks.1.conv": ["QSCHEME", "per-tensor-symmetric"], "*": ["QUANTIZER.BIT", 6]},
        ],
        "A__SPECIFIC": [{"first": ["QUANTIZER.BIT", 6]}, {"*_conv": ["QUANTIZER.TYPE", "pact", "QUANTIZER.BIT", 7]}],
    }
    found = made(model, x, **changes)
    weights = {n: str(q.spec) for n, q in quantizers(found).items() if n.endswith("_weight_quantizer")}
    assert weights == {
        "first._weight_quantizer": "int4 symmetric channel:0",
        "blocks.0.conv._weight_quantizer": "int5 symmetric channel:0",
        "blocks.1.conv._weight_quantizer": "int8 symmetric tensor",
        "fc._weight_quantizer": "int6 symmetric channel:0",
    }
    assert found.first.weight_quantizer.observer_name == "MSEObserver"
    assert found.first.input_quantizer.spec.bits == 6
    for block in found.blocks:
        assert (block.conv.input_quantizer.spec.bits, block.conv.input_quantizer.method_name) == (7, "PACTFakeQuantize")
    assert found.fc.input_quantizer.spec.bits == 8


PARTS = [
    "blocks_0_conv",
    "blocks_1_conv",
    "blocks.0.conv",
    "first",
    "fc",
    "*",
    "blocks_*",
    "*conv",
    "blocks_?_conv",
    "f*",
]
NAMES = ["first", "blocks.0.conv", "blocks.1.conv", "blocks.0.norm1", "fc"]


@settings(max_examples=300)
@example([("blocks_0_conv", 2)], [("blocks.0.conv", 3)], False)
@given(
    st.lists(st.tuples(st.sampled_from(PARTS), st.integers(2, 8)), max_size=4),
    st.lists(st.tuples(st.sampled_from(PARTS), st.integers(2, 8)), max_size=4),
    st.booleans(),
)
def test_the_first_pattern_of_each_list_holds(of_weight, of_input, apart):
    def specific(entries):
        pairs = [{name: ["QUANTIZER.BIT", bits]} for name, bits in entries]
        return pairs if apart else [dict(kv for pair in reversed(pairs) for kv in pair.items())]

    lists = {"W": specific(of_weight), "A": specific(of_input)}
    recipe, _ = to_recipe({"SCHEDULE": {"FUSE_BN": True}, **{k: {"SPECIFIC": entries} for k, entries in lists.items()}})
    for name in NAMES:
        rule = recipe.rule_for(RuleTarget(name, operator="conv2d"))
        for kind, tensor in (("W", "weight"), ("A", "input")):
            fits = [
                changes[1]
                for entry in lists[kind]
                for pattern, changes in entry.items()
                if fnmatchcase(name, pattern) or fnmatchcase(name.replace(".", "_"), pattern)
            ]
            assert (getattr(rule, tensor).bits if rule else None) == (fits[0] if fits else None)


def test_specific_layers_that_stay_float(model, x):
    off = [{"blocks_0_conv": ["QUANTIZER.DISABLE", True]}]
    found = made(model, x, W__SPECIFIC=off, A__SPECIFIC=off)
    assert verdicts(found)["blocks.0.conv"] == "float"
    assert verdicts(found)["blocks.1.conv"] == "integer"
    only_input = made(model, x, A__SPECIFIC=off)
    assert only_input.blocks[0].conv.weight_quantizer.spec.bits == 8
    assert verdicts(only_input)["blocks.0.conv"] == "partly"


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BACKND": "virtual"}, r"the config has no key 'BACKND': did you mean 'BACKEND'"),
        ({"BACKEND": "tensort"}, r"unknown backend 'tensort': did you mean 'tensorrt'"),
        ({"BACKEND": 3}, r"BACKEND is the name of a target, not 3"),
        ({"W": {"QUANTIZER": {"BITS": 8}}}, r"W.QUANTIZER has no key 'BITS': did you mean 'BIT'"),
        ({"W": {"QUANTIZER": {"PACT": {}}}}, r"W.QUANTIZER has no key 'PACT'"),
        ({"W": {"QUANTIZER": 8}}, r"W.QUANTIZER must be a mapping of settings, not 8"),
        ({"W": {"QUANTIZER": {"BIT": "8"}}}, r"W.QUANTIZER.BIT is a number of bits, not '8'"),
        ({"W": {"QUANTIZER": {"DISABLE": "no"}}}, r"W.QUANTIZER.DISABLE is True or False, not 'no'"),
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
        ({"SCHEDULE": {"FUSE_BN": 1}}, r"SCHEDULE.FUSE_BN is True or False, not 1"),
        ({"A": {"QADD": {"ENABLE": True}}}, r"A.QADD has no key 'ENABLE': did you mean 'ENABLE_QUANT'"),
        ({"W": {"SPECIFIC": {"first": []}}}, r"W.SPECIFIC is a list of mappings"),
        ({"W": {"SPECIFIC": ["first"]}}, r"W.SPECIFIC has mappings from names to lists of settings, not 'first'"),
        ({"W": {"SPECIFIC": [{"first": ["QUANTIZER.BIT"]}]}}, r"W.SPECIFIC\['first'\] is a list of keys and values"),
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
    with pytest.raises(CalibrationError, match=r"the model has not been run yet"):
        qmodel.set_quant(True, True)
    with pytest.raises(CalibrationError, match=r"there is no calibration data"):
        qmodel.calc_qparams()
    qmodel.prepare_calibration()
    with pytest.raises(CalibrationError, match=r"there is no calibration data"):
        qmodel.calc_qparams()


def test_a_model_that_is_no_graph_cannot_be_run_node_by_node(x):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x) if x.sum().item() > -1e9 else x

    qmodel = QuantModel(Asks(), YAML, x)
    qmodel.prepare_calibration()
    qmodel(x)
    with pytest.raises(ConfigError, match=r"Asks runs as it is written, not as one graph"):
        qmodel.calc_qparams(asym=True)


def test_names_under_the_old_root():
    from bitwright.compat.sparsebit import quantization
    from bitwright.compat.sparsebit.quantization import converters, modules

    assert (quantization.QuantModel, quantization.parse_qconfig) == (QuantModel, parse_qconfig)
    assert modules.register_qmodule is bw.nn.register_qmodule
    assert converters.MatcherNode is bw.MatcherNode
