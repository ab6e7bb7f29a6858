import copy
import pathlib
import re

import pytest
import torch
from torch import fx, nn

import bitwright
from bitwright.graph import capture_model
from bitwright.graph.facts import Facts, copy_facts, dtype_of, facts, has_facts, is_floating, set_facts, shape_of


@pytest.fixture
def model():
    return capture_model(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.randn(2, 3),)).model


def test_capture_notes_what_it_sees(model):
    first, last = (n for n in model.graph.nodes if n.op == "call_module")
    assert (shape_of(first), dtype_of(last), is_floating(last)) == ((2, 4), torch.float32, True)
    assert not facts(first).plain
    assert not facts(first).written


def test_nothing_is_known_of_a_new_node():
    node = fx.Graph().placeholder("x")
    assert not has_facts(node)
    assert facts(node) == Facts()
    assert shape_of(node) is None
    assert dtype_of("x") is None
    assert not is_floating(node)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: fx.GraphModule(m, _graph_copy(m))])
def test_a_copy_of_a_graph_keeps_the_facts_and_its_changes_stay_its_own(model, copied):
    other = copied(model)
    for node, twin in zip(model.graph.nodes, other.graph.nodes, strict=True):
        before = facts(node)
        assert facts(twin) == before
        set_facts(twin, written=True)
        assert facts(node) == before
        assert facts(twin).written


def test_a_node_that_takes_over_facts_does_not_share_later_changes(model):
    source, target = (n for n in model.graph.nodes if n.op == "call_module")
    copy_facts(source, target)
    set_facts(target, scope="elsewhere")
    assert facts(source).scope == ""
    assert shape_of(source) == (2, 4)


def test_facts_have_one_writer_and_no_unknown_fields(model):
    node = next(iter(model.graph.nodes))
    with pytest.raises(AttributeError):
        facts(node).scope = "a"
    with pytest.raises((TypeError, ValueError), match="shapes"):
        set_facts(node, shapes=(1,))


def test_only_facts_py_reaches_into_the_meta_of_nodes():
    root = pathlib.Path(bitwright.__file__).parent
    users = [p.name for p in root.rglob("*.py") if re.search(r"\.meta\b", p.read_text()) and p.name != "facts.py"]
    assert users == []


def _graph_copy(model):
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    return graph
