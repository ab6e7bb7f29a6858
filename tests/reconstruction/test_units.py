"""Which parts of a graph are learned together."""

import pytest

from bitwright.reconstruction.learned import learnable_weights
from bitwright.reconstruction.units import find_units
from tests.reconstruction.nets import calibrated


def units(name, kind="block", merge=1, recipe="W4A8"):
    model, _ = calibrated(name, recipe)
    found = find_units(model, lambda node: bool(learnable_weights(model, node)), kind, merge)
    calls = [n for n in model.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    assert [n for unit in found for n in unit.nodes] == calls  # nothing is lost, and the order is the graph's
    return found


@pytest.mark.parametrize("recipe", ["W4A8", "W4A4"])
def test_residual_blocks_are_units(recipe):
    assert [u.name for u in units("residual", recipe=recipe)] == ["0", "2", "3", "6"]


@pytest.mark.parametrize("recipe", ["W4A8", "W4A4"])
def test_an_inverted_residual_without_shortcut_is_a_unit_like_one_with_it(recipe):
    assert [u.name for u in units("inverted", recipe=recipe)] == ["0", "2", "3", "6"]


def test_transformer_blocks_are_units_despite_the_mask():
    found = units("transformer")
    assert [u.name for u in found] == ["blocks.0", "blocks.1", "head"]
    assert [[n.name for n in u.inputs if n.op == "placeholder"] for u in found] == [["x", "mask"], ["mask"], []]


def test_a_dense_block_is_a_unit():
    assert sum("layers" in str(n.target) for n in units("dense")[0].nodes) == 3


def test_every_layer_is_a_unit_if_asked_for():
    assert [u.name for u in units("residual", "layer")] == [
        *("0", "2.conv1", "2.conv2", "3.conv1", "3.conv2", "6"),
    ]


def test_what_changes_the_shape_belongs_to_what_follows():
    last, before = units("residual")[-1], units("residual")[-2]
    assert "4" in [str(n.target) for n in last.nodes]  # the pooling
    assert "4" not in [str(n.target) for n in before.nodes]


def test_neighbours_are_merged():
    assert [len(u.nodes) for u in units("residual", merge=2)] == [
        sum(len(u.nodes) for u in units("residual")[i : i + 2]) for i in (0, 2)
    ]


def test_a_block_of_too_many_layers_is_split(monkeypatch):
    monkeypatch.setattr("bitwright.reconstruction.units.MOST_LAYERS", 3)
    names = [u.name for u in units("transformer")]
    assert len(names) > 3
    assert names[-1] == "head"
