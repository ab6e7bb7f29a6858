"""Schedules registered: their order, the options and switches of a recipe, and debug mode."""

import operator
from importlib import metadata

import pytest
import torch
import yaml
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError, ScheduleError, UnknownNameError
from bitwright.graph import (
    SCHEDULES,
    MatcherNode,
    ReplacePatternBase,
    capture_model,
    register_schedule,
    run_stage,
    runner,
)
from bitwright.graph.rewriting.order import order_schedules
from bitwright.registry import ENTRY_POINT_GROUP, Registry

pytestmark = pytest.mark.usefixtures("own_plugins")


def declare(name, stage="simplify", **settings):
    register_schedule(name, stage, **settings)(lambda model: [])


def order(stage="simplify"):
    return [s.name for s in order_schedules(stage)]


def test_schedules_run_in_the_order_they_declare():
    declare("a", after=("d",))
    declare("b")
    declare("c", before=("b",), after=["d"])
    declare("d", before="b", aliases=("dee",))
    declare("last", after=("*",))
    declare("zero", before=("functionalize",))
    declare("after_zero_too", after="zero", before=["functionalize"])
    declare("e", after=("dee",))
    found = [n for n in order() if len(n) == 1 or n in ("last", "zero", "after_zero_too", "functionalize")]
    assert found == ["zero", "after_zero_too", "functionalize", "d", "a", "c", "b", "e", "last"]


def test_schedules_of_the_other_stage_and_of_none():
    declare("late", "fuse", after=("functionalize",))
    assert "late" in order("fuse")
    declare("early", after=("fold_batchnorm",))
    with pytest.raises(ConfigError, match="'early' of stage 'simplify' cannot run after 'fold_batchnorm' of 'fuse'"):
        order()
    SCHEDULES.unregister("early")
    declare("hasty", "fuse", before=("functionalize",))
    with pytest.raises(ConfigError, match="'hasty' of stage 'fuse' cannot run before 'functionalize' of 'simplify'"):
        order("fuse")
    SCHEDULES.unregister("hasty")
    declare("lost", after=("functionalise",))
    with pytest.raises(
        UnknownNameError,
        match=r"'lost' must run after the unknown schedule 'functionalise': did you mean 'functionalize'",
    ):
        order()


def test_a_circle_is_named():
    declare("p", after=("q",))
    declare("q", after=("r",))
    declare("r", after=("p",))
    declare("s", after=("p",))
    with pytest.raises(ConfigError, match="'simplify' wait for each other: 'p' after 'q' after 'r' after 'p'"):
        order()


@pytest.mark.parametrize(
    ("name", "stage", "source", "message"),
    [
        ("", "fuse", print, "name must be a non-empty string"),
        ("x", "fold", print, "stage of the schedule 'x' must be 'simplify' or 'fuse', not 'fold'"),
        ("x", "fuse", 3, "must be a function or a ReplacePatternBase, not 3"),
        ("x", "fuse", nn.ReLU, "must be a function or a ReplacePatternBase, not <class"),
        ("x", "fuse", lambda: [], "must take the model as its first argument"),
        ("x", "fuse", lambda model, size: [], "the option 'size' of the schedule 'x' needs a default"),
        ("fuse_bn", "fuse", lambda model: [], "'fuse_bn' is registered twice"),
    ],
)
def test_what_cannot_be_registered(name, stage, source, message):
    with pytest.raises(ConfigError, match=message):
        register_schedule(name, stage)(source)


# ------------------------------------------------------------------------------------------ options and switches


def recorder(default=True):
    calls = []

    @register_schedule("Record_It", stage="simplify", default=default)
    def record(model, threshold: float = 0.5, names: tuple[str, ...] = (), anything=None):
        calls.append((threshold, names, anything))
        return ["looked"]

    return calls


@pytest.mark.parametrize(
    ("switches", "calls"),
    [
        ({}, [(0.5, (), None)]),
        ({"Record_It": False}, []),
        ({"Record_It": True}, [(0.5, (), None)]),
        ({"RECORD_IT": {"THRESHOLD": 1}}, [(1.0, (), None)]),
        ({"record_it": {"names": ["a"], "anything": {"b": 1}}}, [(0.5, ("a",), {"b": 1})]),
    ],
)
def test_the_recipe_switches_schedules_and_sets_their_options(switches, calls, tmp_path):
    made = recorder()
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"SCHEDULE" if "RECORD_IT" in switches else "schedules": switches}))
    model = bw.prepare(nn.Linear(2, 2), torch.randn(1, 2), recipe=file)
    assert made == calls
    assert ("Record_It: looked" in bw.ledger_of(model).notes) is bool(calls)


def test_a_schedule_that_is_off_by_default_is_switched_on():
    made = recorder(default=False)
    bw.prepare(nn.Linear(2, 2), torch.randn(1, 2))
    assert made == []
    bw.prepare(nn.Linear(2, 2), torch.randn(1, 2), recipe={"schedules": {"record_it": {}}})
    assert len(made) == 1


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"record": True}, "unknown schedule 'record': did you mean 'Record_It'"),
        ({"record_it": {"thresh": 1}}, "'Record_It' has no option 'thresh': did you mean 'threshold'"),
        ({"record_it": {"threshold": "big"}}, "'threshold' of the schedule 'Record_It': .*number.*, not 'big'"),
        ({"record_it": True, "RECORD_IT": False}, "'Record_It' is named twice, the second time as 'RECORD_IT'"),
        ({"record_it": 3}, "schedules.record_it"),
    ],
)
def test_wrong_switches_are_refused_before_any_work(switches, message):
    made = recorder()
    with pytest.raises(ConfigError, match=message):
        bw.prepare(nn.Linear(2, 2), torch.randn(1, 2), recipe={"schedules": switches})
    assert made == []


def test_the_options_of_a_class():
    @register_schedule("scaled", stage="simplify")
    class ReplacePattern(ReplacePatternBase):
        def __init__(self, factor: float = 2.0):
            self.factor = factor

        def make_ops(self):
            return [MatcherNode("relu", [None], ["op:relu"])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            return model.graph.call_function(operator.mul, (nodes_dict["relu"], self.factor))

    net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.randn(3, 2)
    for switches, factor in [({}, 2.0), ({"scaled": {"factor": 5}}, 5.0), ({"SCALED": False}, 1.0)]:
        model = bw.prepare(net, x, recipe={"schedules": switches})
        with torch.no_grad():
            assert torch.equal(model(x), factor * net(x))


def test_another_distribution_brings_a_schedule_by_an_entry_point(monkeypatch):
    class Entry:
        name = "their_schedules"

        def load(self):
            declare("theirs", before=("functionalize",))

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Entry()] if group == ENTRY_POINT_GROUP else [])
    monkeypatch.setattr(Registry, "_plugins_loaded", False)
    model = bw.prepare(nn.Linear(2, 2), torch.randn(1, 2), recipe={"schedules": {"THEIRS": True}})
    assert order().index("theirs") < order().index("functionalize")
    assert bw.ledger_of(model).recipe.schedules == {"THEIRS": True}


# ------------------------------------------------------------------------------------------ debug mode


def test_debug_mode_names_the_schedule_that_changes_the_result_and_those_before():
    @register_schedule("sabotage", stage="simplify", after="recolour")
    def sabotage(model):
        for node in model.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.sigmoid
        return ["made relu a sigmoid"]

    declare("recolour")

    class Net(nn.Module):
        def forward(self, x):
            return {"y": torch.relu(x)}

    x = torch.tensor([[-1.0, 3.0]])
    bw.prepare(Net(), x)
    message = (
        r"'sabotage' of stage 'simplify' changes what the model computes: the output\['y'\] differs by 2.05, its "
        r"largest value being 3 \(allowed: 0 of it\); it did: made relu a sigmoid; schedules before it: .*, recolour"
    )
    with pytest.raises(ScheduleError, match=message):
        bw.prepare(Net(), x, debug=True)
    bw.prepare(Net(), x, debug=True, recipe={"schedules": {"sabotage": False}})


@pytest.mark.parametrize(("tolerance", "passes"), [(0.0, False), (1e-3, True)])
def test_a_schedule_declares_how_exact_it_is(tolerance, passes):
    @register_schedule("rounded", stage="simplify", tolerance=tolerance)
    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return [MatcherNode("relu", [None], [torch.relu])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            return model.graph.call_function(operator.mul, (nodes_dict["relu"], 1.0001))

    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    result = capture_model(Net(), x := torch.randn(4, 5))
    check = runner(result.model, (x,), {})
    if passes:
        assert "rounded" in [r.name for r in run_stage(result.model, "simplify", check=check) if r.modified]
    else:
        with pytest.raises(ScheduleError, match="'rounded' of stage 'simplify' changes"):
            run_stage(result.model, "simplify", check=check)


def test_a_function_that_fails_is_named():
    register_schedule("broken", stage="fuse")(lambda model: 1 / 0)
    with pytest.raises(ScheduleError, match="the schedule 'broken' failed: ZeroDivisionError: division by zero"):
        bw.prepare(nn.Linear(2, 2), torch.randn(1, 2))
