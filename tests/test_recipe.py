"""Recipes: all mistakes at once, which rule speaks for a layer, files."""

import pytest

from bitwright.errors import ConfigError, UnknownNameError
from bitwright.recipe import Recipe, Rule, TensorRecipe
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
        "rules.1.skip: Input should be a valid boolean, unable to interpret input, not 3",
        "rules.2.match: 're:(' is not a regular expression: missing ), unterminated subpattern at position 0",
        "rules.3.match: must name a layer, a glob, 're:…' or 'op:…', not ''",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([1, 2], "the recipe must be a mapping of settings, not list"),
        ({"weight": 8}, "the recipe has 1 mistake: weight: Input should be a valid dictionary .*, not 8"),
        ({"backend": 3}, "the recipe has 1 mistake: backend: Input should be a valid string, not 3"),
        ({"rules": "fc"}, "the recipe has 1 mistake: rules: Input should be a valid tuple, not 'fc'"),
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
    ],
)
def test_matching(match, name, scope, operator, expected):
    assert Rule(match=match).matches(name, scope, operator) is expected


def test_the_last_rule_wins():
    recipe = Recipe.parse({"rules": [{"match": "*", "skip": True}, {"match": "fc"}, {"match": "op:add"}]})
    assert recipe.rule_for("conv", "", "conv2d") is recipe.rules[0]
    assert recipe.rule_for("fc", "", "linear") is recipe.rules[1]
    assert recipe.rule_for("fc", "", "add") is recipe.rules[2]
    assert Recipe().rule_for("fc", "", "linear") is None


def test_rules_that_match_nothing():
    known = [("conv1", "", "conv2d"), ("layer1.0.conv1", "layer1.0", "conv2d"), ("add", "layer1.0", "add")]
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
