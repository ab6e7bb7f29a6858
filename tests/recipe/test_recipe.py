"""Recipes: all mistakes at once, which rule speaks for a layer, files."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bitwright.errors import ConfigError, UnknownNameError
from bitwright.recipe import PRESETS, Recipe, Rule, RuleTarget, TensorRecipe
from bitwright.spec import QuantSpec


def test_an_empty_recipe_is_the_default():
    recipe = Recipe.parse({})
    assert recipe == Recipe()
    assert (recipe.backend, recipe.rules, recipe.weight.spec) == ("onnxruntime", (), None)
    assert Recipe.parse(recipe) is recipe


def test_a_recipe_as_a_mapping():
    recipe = Recipe.parse(
        {
            "backend": "openvino",
            "weight": {"spec": "int4 narrow channel:0"},
            "activation": "uint8",
            "rules": [
                {"match": "fc", "skip": True},
                {"match": "op:conv*", "weight": "int8", "activation": {"observer": "ema_minmax"}},
            ],
        }
    )
    assert recipe.backend == "openvino"
    assert recipe.weight.spec == QuantSpec.parse("int4 narrow channel:0")
    assert recipe.activation == TensorRecipe(spec="uint8")
    assert recipe.rules[0] == Rule(match="fc", skip=True)
    assert recipe.rules[1].weight.spec == QuantSpec.parse("int8")
    assert recipe.rules[1].activation.observer == "ema_minmax"


def test_a_recipe_prints_as_data_that_it_reads():
    recipe = Recipe.parse({"weight": "int4 group:32:1", "rules": [{"match": "a.*", "activation": "int8"}]})
    assert recipe.model_dump()["weight"]["spec"] == "int4 symmetric group:32:1"
    assert Recipe.parse(recipe.model_dump()) == recipe


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Recipe.parse(
            {
                "bakend": "onnxruntime",
                "weight": {"sepc": "int8", "spec": "nit8"},
                "rules": [{"match": "fc", "skp": True}, {"skip": 3}, {"match": "re:("}, {"match": ""}],
            }
        )
    text = str(caught.value)
    assert text.startswith("the recipe has 8 mistakes: ")
    for expected in (
        "bakend: is unknown: did you mean 'backend'?",
        "weight.sepc: is unknown: did you mean 'spec'?",
        "weight.spec: unknown number format 'nit8': did you mean 'int8'",
        "rules.0.skp: is unknown: did you mean 'skip'?",
        "rules.1.match: Field required",
        "rules.1.skip: must be true or false, not 3",
        "rules.2.match: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0",
        "rules.3.match: must name a layer, a glob, 're:…', 'op:…', 'type:…' or 'node:…', not ''",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([1, 2], "the recipe must be a mapping of settings, not list"),
        (
            {"weight": 8},
            "the recipe has 1 mistake: weight: must be a spec, such as 'int8 symmetric tensor', or a mapping, not 8",
        ),
        ({"backend": 3}, "the recipe has 1 mistake: backend: must be text, not 3"),
        ({"rules": "fc"}, "the recipe has 1 mistake: rules: must be a list, not 'fc'"),
    ],
)
def test_wrong_types(source, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.parse(source)


def test_files(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("backend: openvino\nweight: int8 channel:0\nrules:\n  - {match: 'layer1.*', skip: true}\n")
    expected = Recipe.parse(
        {"backend": "openvino", "weight": "int8 channel:0", "rules": [{"match": "layer1.*", "skip": True}]}
    )
    assert Recipe.parse(path) == Recipe.parse(str(path)) == expected
    json = tmp_path / "recipe.json"
    json.write_text('{"backend": "openvino", "weight": {"spec": "int8 channel:0"}}')
    assert Recipe.parse(json).weight == expected.weight


def test_bad_files(tmp_path):
    path = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match=r"the recipe '.*recipe.yaml' cannot be read: .*No such file"):
        Recipe.parse(path)
    path.write_text("backend: [")
    with pytest.raises(ConfigError, match=r"recipe.yaml' cannot be read: while parsing"):
        Recipe.parse(path)
    path.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ConfigError, match=r"recipe.yaml' cannot be read: "):
        Recipe.parse(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"recipe.yaml' must be a mapping of settings, not NoneType"):
        Recipe.parse(path)
    path.write_text("bakend: openvino")
    with pytest.raises(ConfigError, match=r"recipe.yaml' has 1 mistake: bakend: is unknown"):
        Recipe.parse(path)
    path.write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigError, match=r"recipe.yaml' cannot be read: could not determine a constructor"):
        Recipe.parse(path)


@pytest.mark.parametrize(
    ("match", "name", "scope", "operator", "expected"),
    [
        ("layer1.0.conv1", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("layer1", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("layer1", "add", "layer1.0", "add", True),
        ("layer1.0", "add_1", "layer1.0", "add", True),
        ("layer1", "layer10.conv", "layer10", "conv2d", False),
        ("layer1", "add", "", "add", False),
        ("layer?.0.*", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("*.conv1", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("*.CONV1", "layer1.0.conv1", "layer1.0", "conv2d", False),
        (r"re:layer\d\.0\..*", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("re:conv1", "layer1.0.conv1", "layer1.0", "conv2d", False),
        ("op:conv2d", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("op:conv*", "layer1.0.conv1", "layer1.0", "conv2d", True),
        ("op:conv", "layer1.0.conv1", "layer1.0", "conv2d", False),
        ("layer1.*", "add", "layer1.0", "add", True),
        (r"re:layer1\..*\.add", "add", "layer1.0", "add", True),
        ("layer1.0.layer1*", "layer1.0.conv1", "layer1.0", "conv2d", False),
    ],
)
def test_matching(match, name, scope, operator, expected):
    assert Rule(match=match).matches(RuleTarget(name, scope, operator)) is expected


def test_the_last_rule_wins():
    recipe = Recipe.parse({"rules": [{"match": "*", "skip": True}, {"match": "fc"}, {"match": "op:add"}]})
    assert recipe.rule_for(RuleTarget("conv", "", "conv2d")) is recipe.rules[0]
    assert recipe.rule_for(RuleTarget("fc", "", "linear")) is recipe.rules[1]
    assert recipe.rule_for(RuleTarget("fc", "", "add")) is recipe.rules[2]
    assert Recipe().rule_for(RuleTarget("fc", "", "linear")) is None


def test_rules_that_match_nothing():
    known = [
        RuleTarget("conv1", "", "conv2d", ("Conv2d",), "conv1"),
        RuleTarget("layer1.0.conv1", "layer1.0", "conv2d", ("Conv2d", "Block"), "layer1_0_conv1"),
        RuleTarget("add", "layer1.0", "add", ("Block",), "add"),
    ]
    good = Recipe.parse({"rules": [{"match": "layer1"}, {"match": "op:add"}, {"match": "re:conv."}]})
    good.check_rules(known)
    bad = Recipe.parse({"rules": [{"match": "conv"}, {"match": "op:ad"}, {"match": "layer1"}]})
    with pytest.raises(UnknownNameError) as caught:
        bad.check_rules(known)
    assert str(caught.value).startswith(
        "the rule 'conv' matches no layer: did you mean 'conv1' or 'layer1.0.conv1'?; "
        "the rule 'op:ad' matches no layer: did you mean 'op:add' "
    )


def test_gaps_are_filled():
    base = TensorRecipe(spec="uint8", observer="ema_minmax", observer_options={"ema_ratio": 0.5}, method="fixed")
    assert TensorRecipe().over(base) == base
    wish = TensorRecipe(spec="int8").over(base)
    assert (str(wish.spec), wish.observer, wish.observer_options) == (
        "int8 symmetric tensor",
        "ema_minmax",
        {"ema_ratio": 0.5},
    )
    # The options of one observer are not those of another.
    other = TensorRecipe(observer="minmax").over(base)
    assert (other.observer, other.observer_options, other.method) == ("minmax", {}, "fixed")


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ("type:Conv2d", True),
        ("type:_ConvNd", True),
        ("type:Block", True),
        ("type:*Block", True),
        ("type:Conv1d", False),
        ("type:conv2d", False),
        ("node:layer1_0_conv1", True),
        ("node:*_conv1", True),
        ("node:conv1", False),
        ("layer1_0_conv1", False),
    ],
)
def test_matching_by_class_and_node(match, expected):
    types = ("Conv2d", "_ConvNd", "Block", "Sequential", "Net")
    subject = RuleTarget("layer1.0.conv1", "layer1.0", "conv2d", types, "layer1_0_conv1")
    assert Rule(match=match).matches(subject) is expected


def test_rules_without_a_match_get_suggestions_unless_they_are_optional():
    known = [RuleTarget("layer1.0.conv1", "layer1.0", "conv2d", ("Conv2d", "Block"), "layer1_0_conv1")]
    bad = Recipe.parse({"rules": [{"match": "type:Conv3d"}, {"match": "node:layer1_0_conv"}]})
    with pytest.raises(UnknownNameError) as caught:
        bad.check_rules(known)
    assert "the rule 'type:Conv3d' matches no layer: did you mean 'type:Conv2d' or" in str(caught.value)
    assert "'node:layer1_0_conv' matches no layer: did you mean 'node:layer1_0_conv1'?" in str(caught.value)
    Recipe.parse({"rules": [{"match": "type:Conv3d", "optional": True}]}).check_rules(known)


# ------------------------------------------------------------------------------------------------- loss-free


_NAMES = st.text(alphabet="abc.*_0?", min_size=1, max_size=8)
_SPECS = st.sampled_from(["int8 symmetric narrow channel:0", "uint4 affine tensor", "e4m3", "int4 group:32:1", "float"])
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_OPTIONS = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.booleans() | st.integers() | _FLOATS | st.text(max_size=6) | st.lists(_FLOATS, max_size=2),
    max_size=2,
)
_TENSORS = st.builds(
    lambda spec, bits, **rest: TensorRecipe(spec=spec, bits=None if spec else bits, **rest),
    spec=st.none() | _SPECS,
    bits=st.none() | st.integers(1, 16),
    observer=st.none() | st.text(min_size=1, max_size=6),
    method=st.none() | st.text(min_size=1, max_size=6),
    observer_options=_OPTIONS,
    method_options=_OPTIONS,
)
_RULES = st.builds(Rule, match=_NAMES, optional=st.booleans(), weight=_TENSORS, input=_TENSORS, output=_TENSORS) | (
    st.builds(Rule, match=_NAMES, skip=st.just(True))
)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Recipe, backend=_NAMES, weight=_TENSORS, activation=_TENSORS, rules=st.lists(_RULES, max_size=3).map(tuple)
    )
)
def test_recipes_survive_every_way_there_and_back(recipe):
    assert Recipe.parse(recipe.to_dict()) == recipe
    assert Recipe.parse(recipe.to_yaml()) == recipe
    assert Recipe.parse(recipe.to_json()) == recipe
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe
    assert next(iter(recipe.to_dict())) == "backend"


def test_a_saved_recipe_is_short_and_readable(tmp_path):
    recipe = Recipe.parse(
        {
            "backend": "snpe",
            "activation": {"spec": "uint8", "observer": "mse"},
            "rules": [{"match": "fc", "weight": "int4"}],
        }
    )
    path = recipe.save(tmp_path / "new" / "recipe.yaml")
    assert path.read_text() == (
        "backend: snpe\n"
        "activation:\n"
        "  spec: uint8 affine tensor\n"
        "  observer: mse\n"
        "rules:\n"
        "- match: fc\n"
        "  weight: int4 symmetric tensor\n"
    )
    assert Recipe.parse(path) == Recipe.parse(recipe.save(tmp_path / "recipe.json")) == recipe
    with pytest.raises(ConfigError, match=r"a recipe is saved as .yaml, .yml, .json, not as '.toml'"):
        recipe.save(tmp_path / "recipe.toml")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["recipe.json", "recipe.yaml"]


def test_numbers_in_yaml_are_numbers_and_keys_stand_once():
    recipe = Recipe.parse("weight:\n  observer: mse\n  observer_options: {p: 1e-3, q: 2.5E+2, r: '1e-3'}\n")
    assert recipe.weight.observer_options == {"p": 0.001, "q": 250.0, "r": "1e-3"}
    assert Recipe.parse("{backend: snpe,\n weight: int4}\n") == Recipe.parse('{"backend": "snpe",\n"weight": "int4"}')
    with pytest.raises(ConfigError, match="the key 'weight' appears twice in one mapping"):
        Recipe.parse("weight: int8\nweight: int4\n")


def test_a_recipe_cannot_be_changed():
    recipe = Recipe.parse("W4A8")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.backend = "snpe"
    with pytest.raises(ValidationError, match="frozen"):
        recipe.weight.bits = 3


# --------------------------------------------------------------------------------------------------- presets


def test_presets():
    assert {"W8A8", "W4A8", "W4A4", "W2A4", "W4A16", "W8A16", "FP8"} <= set(PRESETS)
    four = Recipe.parse("W4A4")
    assert (four.backend, four.weight.bits, four.activation.bits) == ("academic", 4, 4)
    assert Recipe.parse("w4a4") == Recipe.parse({"preset": "W4A4"}) == Recipe(preset="W4A4") == four
    assert (four.weight.observer, four.activation.observer) == ("BoundedMSEObserver", "MSEObserver")
    assert four.correct == ("equalize", "gptq", "norms", "bias")
    assert Recipe.parse("W8A8").weight.observer is None
    assert Recipe.parse("W8A8").correct == ()
    only_weights = Recipe.parse("W4A16")
    assert (only_weights.weight.bits, only_weights.activation.spec) == (4, "float")
    fp8 = Recipe.parse("FP8")
    assert {str(fp8.weight.spec), str(fp8.activation.spec)} == {"e4m3 symmetric channel:0", "e4m3 symmetric tensor"}
    for name in PRESETS:
        assert Recipe.parse(Recipe.parse(name).to_yaml()) == Recipe.parse(name)
        assert "preset" not in Recipe.parse(name).to_dict()


def test_settings_over_a_preset():
    recipe = Recipe.parse(
        {
            "preset": "W4A4",
            "backend": "virtual",
            "weight": {"observer": "mse"},
            "activation": "uint8",
            "rules": [{"match": "fc", "skip": True}],
        }
    )
    assert recipe.backend == "virtual"
    assert recipe.weight == TensorRecipe(bits=4, observer="mse")
    assert recipe.activation == TensorRecipe(spec="uint8")
    assert Recipe.parse({"preset": "W4A4", "weight": {"spec": "int3"}}).weight == TensorRecipe(
        spec="int3", observer="BoundedMSEObserver"
    )
    grouped = Recipe.parse({"preset": "W4A16_G128", "rules": [{"match": "fc", "skip": True}]})
    assert [r.match for r in grouped.rules] == ["op:linear", "fc"]


def test_unknown_presets():
    with pytest.raises(UnknownNameError, match=r"unknown preset 'W4A5', and no such file: did you mean 'W4A8'"):
        Recipe.parse("W4A5")
    with pytest.raises(ConfigError, match=r"2 mistakes: preset: unknown preset 'W4A5': did you mean .*; bakend: is"):
        Recipe.parse({"preset": "W4A5", "bakend": "snpe"})


# ------------------------------------------------------------------------------------------- tensors and rules


def test_bits_keep_all_else():
    base = TensorRecipe(spec="uint8 affine channel:1", observer="minmax")
    assert str(TensorRecipe(bits=4).over(base).spec) == "uint4 affine channel:1"
    assert TensorRecipe(bits=4).over(TensorRecipe(bits=8)).bits == 4
    assert TensorRecipe(spec="int8").over(TensorRecipe(bits=4)) == TensorRecipe(spec="int8")
    assert TensorRecipe(bits=4).over(TensorRecipe(spec="float")).over(base).spec == QuantSpec.parse("uint4 channel:1")
    assert TensorRecipe(spec="float").over(base).floating
    for wrong, message in (
        ({"spec": "int8", "bits": 4}, r"weight: give spec \('int8 symmetric tensor'\) or bits \(4\), not both"),
        ({"bits": 0}, "weight.bits: Input should be greater than or equal to 1, not 0"),
        ({"bits": "4"}, "weight.bits: must be a whole number, not '4'"),
        ("floot", "weight.spec: unknown spec 'floot': did you mean 'float'?"),
    ):
        with pytest.raises(ConfigError, match=message):
            Recipe.parse({"weight": wrong})


def test_what_a_rule_asks_of_inputs_and_results():
    rule = Rule(match="fc", activation={"spec": "uint8", "observer": "mse"}, output={"bits": 4})
    assert rule.asked("input") == TensorRecipe(spec="uint8", observer="mse")
    assert rule.asked("output") == TensorRecipe(spec="uint4", observer="mse")
    assert rule.asked("weight").empty
    assert rule.asks == ["activation", "output"]
    with pytest.raises(ConfigError, match=r"rules\.0: the rule 'fc' skips its operators and asks for weight"):
        Recipe.parse({"rules": [{"match": "fc", "skip": True, "weight": "int8"}]})


# ---------------------------------------------------------------------------------------------------- schema


def test_the_schema_describes_what_is_read():
    schema = Recipe.schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]["Rule"]["properties"]) == set(Rule.model_fields)
    assert all(p.get("description") for p in schema["properties"].values())
    text, whole = schema["$defs"]["TensorRecipe"]["anyOf"]
    assert text["type"] == "string"
    assert set(whole["properties"]) == set(TensorRecipe.model_fields)


def test_the_published_schema_is_current():
    published = json.loads((Path(__file__).parents[2] / "docs" / "recipe.schema.json").read_text())
    assert published == Recipe.schema(), "run: bitwright recipe schema -o docs/recipe.schema.json"
