"""Names of backends, backends in files, and backends made in Python."""

import json

import pytest

import bitwright as bw
from bitwright.backends import BACKENDS, Backend, find_backend, load_backend, register_backend
from bitwright.errors import ConfigError, UnknownNameError
from tests.backends.probe import images, old_names, probe


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *[("Tensorrt", "tensorrt"), ("SNPE", "snpe"), ("ONNX_QNN", "onnx_qnn"), ("onnx-qnn", "onnx_qnn")],
        *[("PPLW8A16", "pplw8a16"), ("PPLCUDA", "pplcuda"), ("OPENVINO", "openvino"), ("Vitis", "vitis")],
        *[("Tengine_u8", "tengine_u8"), ("Tensorrt_NLP", "tensorrt_nlp"), ("Academic_NLP", "academic_nlp")],
        *[("NNIE", "nnie"), ("STPU", "stpu"), ("QDQ", "qdq"), ("Academic", "academic"), ("VIRTUAL", "virtual")],
    ],
)
def test_old_spellings(spelling, name):
    assert find_backend(spelling) is BACKENDS.get(name)


def test_misspelt_names():
    with pytest.raises(UnknownNameError, match="unknown backend 'Tensort': did you mean 'tensorrt'"):
        bw.prepare(probe(), images(), "Tensort")
    with pytest.raises(ConfigError, match="backend must be a name or a Backend, not 3"):
        find_backend(3)


def test_a_backend_in_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: tensorrt\nname: mine\ntitle: my chip\nweights: int4 narrow tensor\nactivations: {spec: int8}\n"
        "operators:\n  integer: {conv2d: both, linear: true, add: inputs}\n  fused: [relu]\n  merged: {add: [mul]}\n"
    )
    mine = load_backend(path)
    assert mine == find_backend(path) == find_backend(str(path)) == Backend.parse(path)
    assert mine.operators.integer == {"conv2d": "both", "linear": "both", "add": "inputs"}
    assert (mine.operators.fused, mine.operators.merged) == (frozenset({"relu"}), {"add": frozenset({"mul"})})
    base = find_backend("tensorrt")  # groups keep the settings that the file does not name
    assert mine.weights == base.weights.model_copy(update={"spec": bw.QuantSpec.parse("int4 narrow tensor")})
    assert mine.activations.observer == base.activations.observer == "EMAMinMaxObserver"
    assert mine.operators.numbers == base.operators.numbers == frozenset({"add", "mul"})
    model = bw.prepare(probe(), images(), str(path))
    assert bw.ledger_of(model).backend == mine
    assert str(model.conv3.weight_quantizer.spec) == "int4 symmetric narrow tensor"
    recipe = bw.Recipe(backend=str(path))
    assert bw.ledger_of(bw.prepare(probe(), images(), recipe=recipe)).backend == mine
    assert bw.ledger_of(model).recipe.backend == str(path)
    document = tmp_path / "mine.json"
    document.write_text(json.dumps({"base": "mine.yaml", "name": "other"}))
    with pytest.raises(ConfigError, match=r"the backend 'mine.yaml' cannot be read"):
        load_backend(document)


def test_globs_stand_for_operators():
    mine = Backend.of(
        name="mine",
        title="my chip",
        operators={"integer": {"conv?d": "both", "conv1d": "inputs"}, "fused": ["*relu*"], "reasons": {"*_norm": "no"}},
    )
    assert mine.operators.integer == {"conv1d": "inputs", "conv2d": "both", "conv3d": "both"}
    assert mine.operators.fused == {"leaky_relu", "prelu", "relu", "relu6"}
    assert set(mine.operators.reasons) == {"batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"}


def test_all_mistakes_of_a_backend_are_named_at_once(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ntitlee: my chip\nself: 1\n"
        "weights: {spec: int, granularities: [chanel], formats: [int7, itn8]}\n"
        "activations: {spec: int8, observer: minmx, method: LQS, observr: minmax}\n"
        "operators: {fused: [rleu], integer: {conv: inputs, linear: inputz, 'cov?d': both}, numbers: 3}\n"
        "foldings: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_backend(path)
    text = str(caught.value)
    assert text.startswith(f"the backend {str(path)!r} has 15 mistakes: ")
    for expected in (
        "title: Field required",
        "titlee: is unknown: did you mean 'title'",
        "self: is unknown",
        "foldings: is unknown: did you mean 'folding'",
        "weights.spec: unknown number format 'int': did you mean",
        "weights.granularities.0: Input should be 'tensor', 'channel' or 'group', not 'chanel'",
        "weights.formats: unknown number format 'itn8': did you mean 'int8'",
        "activations.observr: is unknown: did you mean 'observer'",
        "activations.observer: unknown observer 'minmx': did you mean 'minmax'",
        "activations.method: unknown method 'LQS': did you mean 'lsq'",
        "operators.numbers: must be a list, not 3",
        "unknown operator 'rleu': did you mean 'relu'",
        "unknown operator 'conv': did you mean 'conv",
        "unknown operator 'cov?d': did you mean 'conv",
        "operators.integer.linear: Input should be 'inputs', 'outputs' or 'both', not 'inputz'",
    ):
        assert expected in text
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"mine.yaml' must be a mapping of settings, not list"):
        load_backend(path)


def test_a_backend_of_ones_own_in_python():
    base = find_backend("tensorrt")
    mine = register_backend(base.with_(name="MyChip", title="mine", operators={"integer": {"linear": "both"}}))
    try:
        assert find_backend("mychip") is mine
        assert mine.weights == base.weights
        assert base.operators.integer["conv2d"] == "inputs"
        model = bw.prepare(probe(), images(), "mychip")
        assert old_names(model, fused=True) == {"flatten", "fc"}
        with pytest.raises(ConfigError, match="backend 'MyChip' is registered twice"):
            register_backend(mine)
    finally:
        BACKENDS.unregister("MyChip")
    with pytest.raises(
        ConfigError, match=r"the backend 'mine' has 1 mistake: weights.obsever: is unknown: did you mean"
    ):
        base.with_(name="mine", weights={"obsever": "minmax"})
    with pytest.raises(ValueError, match="frozen"):
        base.weights.power_of_two = True
