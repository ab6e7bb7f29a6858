"""A saved model loads with the same behaviour in evaluation and training, whatever was done to it before."""

import warnings

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS, Backend, register_backend
from bitwright.methods import METHODS, Method, register_method
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import quantizers
from bitwright.quantizer.build import build_method
from tests.saving.nets import IMAGES, TOKENS, Small, Tokens, assert_equal, calibrated
from tests.zoo import ZOO


def round_trip(model, folder, build, inputs, **options):
    """Save a model, load it into other weights, and compare the two."""
    bw.save(model, folder)
    torch.manual_seed(99)
    loaded = bw.load(folder, build, **options)
    assert_equal(model, loaded, inputs)
    return loaded


@pytest.mark.parametrize("name", ["ConvNext", "Bert", "PackedTagger", "GptStep"])
def test_nets_of_the_zoo(name, tmp_path):
    case = ZOO[name]
    torch.manual_seed(0)
    inputs = case.inputs(2, case.size)
    model = bw.calibrate(bw.prepare(case.build(), inputs), [inputs])
    bw.save(model, tmp_path / "m")
    loaded = bw.load(tmp_path / "m", case.build)
    with torch.no_grad():
        assert str(case.call(model, inputs)) == str(case.call(loaded, inputs))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


def later_method(model):
    for quantizer in quantizers(model).values():
        quantizer.method = build_method(quantizer.spec, "LearnableFakeQuantize", {"use_grad_scaling": False})
        quantizer.method.start(*quantizer._stored())


def learned_rounding(model):
    for site in weight_sites(model):
        site.quantizer.method = build_method(site.quantizer.spec, "AdaRoundFakeQuantize")
        site.quantizer.method.init(site.weight(), *site.quantizer.qparams())
        site.quantizer.method.harden()


def fewer_bits(model):
    for quantizer in quantizers(model).values():
        quantizer.change_spec(quantizer.spec.with_(format="int6" if quantizer.spec.format.signed else "uint6"))


def some_disabled(model):
    for quantizer in list(quantizers(model).values())[::2]:
        quantizer.disable()


def parts_fixed(model):
    model.first.requires_grad_(False)
    model.train()
    model.norm2.eval()


CHANGES = {
    "nothing": lambda model: None,
    "another method": later_method,
    "learned rounding": learned_rounding,
    "fewer bits": fewer_bits,
    "some disabled": some_disabled,
    "parts fixed": parts_fixed,
    "frozen norms": bw.freeze_batchnorm,
    "norms by the batch": bw.unfreeze_batchnorm,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_done_since(change, tmp_path):
    model = calibrated()
    CHANGES[change](model)
    round_trip(model, tmp_path / "m", Small, IMAGES)


def test_before_calibration_and_between(tmp_path):
    model = bw.prepare(Small(), IMAGES)
    loaded = round_trip(model, tmp_path / "m", Small, IMAGES)
    for each in (model.eval(), loaded.eval()):
        bw.calibrate(each, [IMAGES])
    assert_equal(model, loaded, IMAGES)


@pytest.mark.parametrize("observer", ["HistogramObserver", "EMAMinMaxObserver", "LSQObserver"])
def test_between_two_batches_of_calibration(observer, tmp_path):
    recipe = {"activation": {"observer": observer}}
    model = bw.prepare(Small(), IMAGES, recipe=recipe)
    for quantizer in quantizers(model).values():
        quantizer.observe()
    model(IMAGES)
    bw.save(model, tmp_path / "m")
    loaded = bw.load(tmp_path / "m", Small)
    for each in (model, loaded):
        each(IMAGES * 3)
        for quantizer in quantizers(each).values():
            quantizer.compute_qparams()
            quantizer.quantize()
    assert_equal(model, loaded, IMAGES)


def test_leaves_schedules_and_equalized_weights(tmp_path):
    recipe = {"schedules": {"cross_layer_equalization": True, "fold_constants": {"persistent": True}}}
    round_trip(calibrated(recipe=recipe, leaves=[nn.Linear]), tmp_path / "m", Small, IMAGES)


@pytest.mark.parametrize("fixed", [None, {"double": True}])
def test_islands_indices_and_fixed_arguments(fixed, tmp_path):
    model = calibrated(Tokens, TOKENS, concrete_args=fixed)
    loaded = round_trip(model, tmp_path / "m", Tokens, TOKENS)
    assert "island" in bw.ledger_of(loaded).islands


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "tensorrt"},
        {
            "quant_desc_input": bw.QuantDescriptor(num_bits=6, learn_amax=True),
            "quant_desc_weight": bw.QuantDescriptor(num_bits=4, axis=(0,)),
            "include": ["first", "fc"],
        },
    ],
)
def test_swapped_modules(options, tmp_path):
    model = bw.calibrate(bw.swap_modules(Small(), example_inputs=IMAGES, **options), [IMAGES])
    round_trip(model, tmp_path / "m", Small, IMAGES)


def test_a_backend_that_is_nowhere_else(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: onnxruntime\nname: mine\ntitle: mine\nweights: {spec: int8 symmetric narrow tensor}\n")
    for backend in (file, Backend.parse(file)):
        model = calibrated(backend=backend)
        file.rename(tmp_path / "away")
        loaded = round_trip(model, tmp_path / "m", Small, IMAGES)
        assert bw.ledger_of(loaded).backend == bw.ledger_of(model).backend
        (tmp_path / "away").rename(file)


@pytest.mark.usefixtures("own_plugins")
def test_plug_ins_are_needed_to_load(tmp_path):
    @register_method("HalvesFakeQuantize")
    class Halves(Method):
        def forward(self, x, scale, zero_point):
            return METHODS.get("FixedFakeQuantize")(self.spec)(x, scale / 2, zero_point)

    def refuse(node):
        return None

    base = BACKENDS.get("virtual")
    mine = register_backend(base.with_(name="mine", operators={"conditions": {"add": refuse}}))
    recipe = {"weight": "int8 channel:0", "activation": {"spec": "int8", "method": "HalvesFakeQuantize"}}
    model = calibrated(backend=mine, recipe=recipe)
    round_trip(model, tmp_path / "m", Small, IMAGES)
    BACKENDS.unregister("mine")
    with pytest.raises(bw.errors.SaveError, match=r"conditions written in Python.*refuse.*backend="):
        bw.load(tmp_path / "m", Small)
    assert_equal(model.eval(), bw.load(tmp_path / "m", Small, backend=mine), IMAGES)
    METHODS.unregister("HalvesFakeQuantize")
    with pytest.raises(bw.errors.SaveError, match="unknown method 'HalvesFakeQuantize'"):
        bw.load(tmp_path / "m", Small, backend=mine)


def test_saved_again_it_is_the_same_folder(tmp_path):
    bw.save(calibrated(), tmp_path / "one", source={"model": "nets:build"})
    loaded = bw.load(tmp_path / "one", Small)
    bw.save(loaded, tmp_path / "two", source={"model": "nets:build"})
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two
    assert (tmp_path / "one/recipe.yaml").read_text() == (tmp_path / "two/recipe.yaml").read_text()


def test_code_that_has_changed_is_told(tmp_path, monkeypatch):
    bw.save(calibrated(), tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bw.load(tmp_path / "m", Small)
    monkeypatch.setattr("bitwright.saving.reading.code_of", lambda model: {"tests.saving.nets.Small": "another"})
    monkeypatch.setattr("bitwright.saving.reading.versions", lambda: {"torch": "0.0"})
    with pytest.warns(bw.errors.SaveWarning, match=r"the code of tests\.saving\.nets\.Small has changed.*torch was"):
        bw.load(tmp_path / "m", Small)
