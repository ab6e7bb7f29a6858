"""Sparsebit's SPECIFIC: settings of single layers."""

from fnmatch import fnmatchcase

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitwright.compat.sparsebit import to_recipe
from bitwright.quantizer import quantizers
from bitwright.recipe import RuleTarget
from tests.compat.sparsebit.nets import made, verdicts


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
