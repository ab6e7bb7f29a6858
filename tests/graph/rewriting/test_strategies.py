"""Strategies: which matches are rewritten, that it ends, and that a right rewrite keeps the meaning of any graph."""

import operator
import random

import pytest
import torch
from torch import fx, nn

from bitwright.errors import ScheduleError
from bitwright.graph import (
    Matcher,
    MatcherNode,
    Pattern,
    ReplaceStrategy,
    register_schedule,
    run_stage,
)
from bitwright.graph.facts import shape_of
from bitwright.graph.match import GraphIndex, InputMatchType
from tests.graph.rewriting.rewriters import PAIR, captured, chain, merge, rewriter, targets

pytestmark = pytest.mark.usefixtures("own_plugins")


@pytest.mark.parametrize(
    ("strategy", "left", "calls"),
    [
        (ReplaceStrategy.APPLY_ONE, 4, 1),
        (ReplaceStrategy.APPLY_ONCE, 4, 1),
        (ReplaceStrategy.APPLY_NOINTERSECT, 3, 2),
        (ReplaceStrategy.APPLY_NOINTERSECT_REPEAT, 1, 4),
        (ReplaceStrategy.APPLY_INTERSECT, 3, 2),
        (ReplaceStrategy.APPLY_INTERSECT_REPEAT, 1, 4),
        (ReplaceStrategy.APPLY_ONE_REPEAT, 1, 4),
        (ReplaceStrategy.APPLY_REPEAT, 1, 4),
        (None, 1, 4),
    ],
)
def test_strategies(strategy, left, calls):
    indices = []

    def action(self, nodes, modules, model, index):
        indices.append(index)
        return merge(self, nodes, modules, model, index)

    model, net, x = captured(chain)
    schedule = rewriter(PAIR, action, strategy)()
    assert schedule.apply(model) is True
    assert targets(model) == ["relu"] * left
    assert indices == list(range(calls))
    assert torch.equal(model(x), net(x))
    assert all(shape_of(n) == (2, 3) for n in model.graph.nodes if n.op == "call_function")


def test_the_intersecting_strategy_takes_what_the_other_leaves():
    def fan(self, x):
        y = torch.relu(x)
        return torch.sigmoid(y), torch.sigmoid(y)

    ops = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.sigmoid])]

    def action(self, nodes, modules, model, index):
        return model.graph.call_function(torch.tanh, (nodes["a"],))

    for strategy, tanhs in [(ReplaceStrategy.APPLY_INTERSECT, 2), (ReplaceStrategy.APPLY_NOINTERSECT, 1)]:
        model, _, _ = captured(fan)
        rewriter(ops, action, strategy)().apply(model)
        assert targets(model).count("tanh") == tanhs


def test_one_instance_on_two_models_starts_anew():
    names = []

    def action(self, nodes, modules, model, index):
        names.append(index)
        return merge(self, nodes, modules, model, index)

    schedule = rewriter(PAIR, action, ReplaceStrategy.APPLY_ONE)()
    for _ in range(2):
        assert schedule.apply(captured(chain)[0])
    assert names == [0, 0]


@pytest.mark.parametrize("strategy", [s for s in ReplaceStrategy if s.repeats])
def test_a_rewrite_that_never_settles_is_named(strategy):
    def action(self, nodes, modules, model, index):
        return model.graph.call_function(torch.relu, nodes["a"].args)

    register_schedule("treadmill", stage="simplify")(
        rewriter([MatcherNode("a", [None], [torch.relu])], action, strategy)
    )
    model, _, _ = captured(chain)
    with pytest.raises(ScheduleError, match=r"the schedule 'treadmill' never settles: .* 7 nodes .* last at relu"):
        run_stage(model, "simplify")


@pytest.mark.parametrize("grows", [True, False])
def test_a_rewrite_at_one_place_of_a_large_graph_is_stopped_soon(grows):
    def forward(self, x):
        x = torch.relu(x)
        for _ in range(300):
            x = torch.neg(x)
        return x

    rounds = []

    def action(self, nodes, modules, model, index):
        rounds.append(index)
        new = model.graph.call_function(torch.relu, nodes["a"].args)
        return model.graph.call_function(torch.neg, (new,)) if grows else new

    model, _, _ = captured(forward)
    with pytest.raises(ScheduleError, match=r"'.*ReplacePattern' never settles: .* a graph of 303 nodes"):
        rewriter([MatcherNode("a", [None], [torch.relu])], action)().apply(model)
    assert len(rounds) == (303 + 101 if grows else 51)


def test_a_rewrite_may_go_the_length_of_the_graph_step_by_step():
    def forward(self, x):
        x = torch.relu(x)
        for _ in range(150):
            x = torch.abs(x)
        return x

    ops = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.abs])]

    def action(self, nodes, modules, model, index):
        first = model.graph.call_function(torch.abs, nodes["a"].args)
        return model.graph.call_function(torch.relu, (first,))

    model, _, x = captured(forward)
    rewriter(ops, action)().apply(model)
    assert targets(model) == ["abs"] * 150 + ["relu"]
    assert torch.equal(model(x), x.abs())


def keep(self, nodes, modules, model, index):
    return nodes["x"]


def zero(self, nodes, modules, model, index):
    return model.graph.call_function(torch.zeros_like, (nodes["x"],))


def distribute(self, nodes, modules, model, index):
    parts = [model.graph.call_function(torch.neg, (n,)) for n in nodes["s"].args]
    return model.graph.call_function(operator.add, tuple(parts))


def distribute_after(self, nodes, modules, model, index):
    with model.graph.inserting_after(nodes["n"]):  # each new node goes before the one made last
        return distribute(self, nodes, modules, model, index)


ANYTHING = MatcherNode("x", None, None)
RULES = {
    "-(-x) = x": ([ANYTHING, MatcherNode("n", ["x"], [torch.neg]), MatcherNode("m", ["n"], [torch.neg])], keep),
    "|-x| = |x|": (
        [MatcherNode("n", [None], [torch.neg]), MatcherNode("a", ["n"], [torch.abs])],
        lambda s, nodes, m, model, i: model.graph.call_function(torch.abs, nodes["n"].args),
    ),
    "x + -x = 0": (
        [
            ANYTHING,
            MatcherNode("n", ["x"], [torch.neg]),
            MatcherNode("s", ["n", "x"], [operator.add], input_match_type=InputMatchType.COMMUTATIVE),
        ],
        zero,
    ),
    "-(x + y) = -x + -y": (
        [MatcherNode("s", [None, None], [operator.add]), MatcherNode("n", ["s"], [torch.neg])],
        distribute,
    ),
    "-(y + x) = -y + -x": (
        [MatcherNode("s", [None, None], [operator.add]), MatcherNode("n", ["s"], [torch.neg])],
        distribute_after,
    ),
}


@pytest.mark.parametrize("strategy", list(ReplaceStrategy))
@pytest.mark.parametrize("rule", RULES)
def test_a_correct_rewrite_keeps_what_any_graph_computes_and_leaves_no_match(rule, strategy):
    ops, action = RULES[rule]
    rewritten = 0
    for seed in range(40):
        model = random_arithmetic(random.Random(seed))
        x = torch.arange(-3.0, 4.0, dtype=torch.float64)
        expected = model(x)
        if rewriter(ops, action, strategy)().apply(model):
            rewritten += 1
        model.graph.lint()
        assert torch.equal(model(x), expected)
        left = list(Matcher(Pattern(ops)).find(GraphIndex(model)))
        assert not (strategy.repeats and left)
        assert all(n.users or n.op in ("placeholder", "output") for n in model.graph.nodes)
    assert rewritten > 5


def random_arithmetic(chance):
    """Sums, negations and absolute values of an input; the output needs all of them."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(chance.randint(4, 14)):
        function = chance.choice([torch.neg, torch.neg, torch.abs, operator.add])
        nodes.append(graph.call_function(function, tuple(chance.choices(nodes[-4:], k=1 + (function is operator.add)))))
    total = nodes[-1]
    for node in nodes[:-1]:
        total = total if node.users else graph.call_function(operator.add, (total, node))
    graph.output(total)
    return fx.GraphModule(nn.Module(), graph)
