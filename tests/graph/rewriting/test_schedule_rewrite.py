"""The engine of schedules: strategies, what get_new_graph may return, what is removed, and near misses."""

import operator
import random

import pytest
import torch
from torch import fx, nn

from bitwright.errors import ConfigError, ScheduleError
from bitwright.graph import (
    Matcher,
    MatcherNode,
    Pattern,
    ReplacePatternBase,
    ReplaceStrategy,
    capture_model,
    register_schedule,
    run_stage,
)
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.match import GraphIndex, InputMatchType

pytestmark = pytest.mark.usefixtures("own_plugins")


def captured(function, x=None, **modules):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x):
            return function(self, x)

    net, x = Net().eval(), torch.randn(2, 3) if x is None else x
    return capture_model(net, x).model, net, x


def targets(model):
    return [n.target if isinstance(n.target, str) else n.target.__name__ for n in model.graph.nodes][1:-1]


def rewriter(ops, action, strategy=None, joint=(), **members):
    """A schedule class made of its parts."""

    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return ops

        def make_joint_checkers(self):
            return joint

        def make_matching_strategy(self):
            return strategy or super().make_matching_strategy()

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            return action(self, nodes_dict, modules_dict, model, transform_idx)

    for name, value in members.items():
        setattr(ReplacePattern, name, value)
    return ReplacePattern


def chain(self, x):
    for _ in range(5):
        x = torch.relu(x)
    return x


PAIR = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.relu])]


def merge(self, nodes, modules, model, index):
    return model.graph.call_function(torch.relu, (nodes["a"].args[0],))


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


@pytest.mark.parametrize("answer", [None, {}, "itself"])
def test_a_rewrite_in_place_happens_once_at_each_place(answer):
    seen = []

    def action(self, nodes, modules, model, index):
        seen.append(nodes["a"].name)
        self.note(f"marked {nodes['a'].name}")
        return {"a": nodes["a"]} if answer == "itself" else answer

    model, _, _ = captured(chain)
    schedule = rewriter([MatcherNode("a", [None], [torch.relu])], action, ReplaceStrategy.APPLY_REPEAT)
    assert schedule().apply(model)
    assert seen == ["relu", "relu_1", "relu_2", "relu_3", "relu_4"]


def test_a_node_can_be_put_after_the_one_that_was_matched():
    def action(self, nodes, modules, model, index):
        return model.graph.call_function(torch.neg, (nodes["a"],))

    model, _, x = captured(lambda self, x: torch.sigmoid(torch.relu(x)))
    rewriter([MatcherNode("a", [None], [torch.relu])], action)().apply(model)
    assert targets(model) == ["relu", "neg", "sigmoid"]
    assert torch.equal(model(x), torch.sigmoid(-torch.relu(x)))


def test_several_anchors_are_replaced_by_a_dict_whatever_the_order_of_the_nodes():
    """Two linear layers that read the same become one, and users of the first come before the second."""

    def forward(self, x):
        q = torch.sigmoid(self.q(x))
        return q * self.k(x)

    ops = [MatcherNode(n, [None], [nn.Linear]) for n in "qk"]
    joint = [(("q", "k"), lambda q, k, modules: q.args[0] is k.args[0] and q < k)]

    def action(self, nodes, modules, model, index):
        both = nn.Linear(3, 8)
        with torch.no_grad():
            both.weight.copy_(torch.cat([modules[n].weight for n in "qk"]))
            both.bias.copy_(torch.cat([modules[n].bias for n in "qk"]))
        name = self.add_module(model, "joined.qk", both)
        whole = model.graph.call_module(name, nodes["q"].args)
        parts = model.graph.call_method("chunk", (whole, 2, -1))
        return {n: model.graph.call_function(operator.getitem, (parts, i)) for i, n in enumerate("qk")}

    model, net, x = captured(forward, q=nn.Linear(3, 4), k=nn.Linear(3, 4))
    assert rewriter(ops, action, joint=joint)().apply(model)
    model.graph.lint()
    assert sorted(targets(model)) == sorted(["joined.qk", "chunk", "getitem", "sigmoid", "getitem", "mul"])
    assert torch.allclose(model(x), net(x), atol=1e-6)
    whole = next(n for n in model.graph.nodes if n.target == "joined.qk")
    assert shape_of(whole) == (2, 8)
    assert facts(whole).replaces == ("q", "k")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n, g: 3, "must return a node, a dict of nodes by name, or None, not 3"),
        (lambda n, g: {"c": n["a"]}, "replaces 'c', which is not a node of its pattern"),
        (lambda n, g: {"a": "relu"}, "replaces 'a' by 'relu', which is not a node of the model's graph"),
        (lambda n, g: fx.Graph().placeholder("x"), "which is not a node of the model's graph"),
        (lambda n, g: 1 / 0, "failed in get_new_graph at relu_1: ZeroDivisionError: division by zero"),
        (lambda n, g: {"a": n["b"].users and next(iter(n["b"].users))}, "read each other in a circle"),
    ],
)
def test_what_get_new_graph_may_not_do(answer, message):
    register_schedule("wrong", stage="simplify")(rewriter(PAIR, lambda s, n, m, model, i: answer(n, model.graph)))
    model, _, _ = captured(lambda self, x: torch.neg(torch.neg(torch.relu(torch.relu(x)))))
    with pytest.raises((ScheduleError, ConfigError), match="the schedule 'wrong'.*" + message):
        run_stage(model, "simplify")


def test_one_node_for_several_anchors_is_refused():
    ops = [MatcherNode("x", [], ["placeholder"]), *(MatcherNode(n, ["x"], [torch.relu, torch.neg]) for n in "ab")]
    schedule = rewriter(ops, lambda s, nodes, *rest: nodes["a"])
    with pytest.raises(ScheduleError, match=r"has several anchors \(a, b\): return the new nodes as a dict by name"):
        schedule().apply(captured(lambda self, x: torch.relu(x) + torch.neg(x))[0])


def test_only_what_nobody_would_miss_is_removed():
    def forward(self, x):
        y = torch.neg(x) * 2
        z = y.clone()
        z.add_(1)
        return torch.sigmoid(y), torch.relu(self.count(z))

    class Count(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    model, _, _ = captured(forward, count=Count())
    constant = rewriter(
        [MatcherNode("a", [None], [torch.relu, torch.sigmoid])],
        lambda s, n, m, model, i: model.graph.call_function(torch.zeros, ((2, 3),)),
    )
    constant().apply(model)
    assert targets(model) == ["neg", "mul", "clone", "add_", "zeros", "zeros"]


def test_near_misses_say_why_not():
    def forward(self, x):
        y = torch.relu(x)
        z = torch.relu(torch.neg(y))
        return torch.sigmoid(y), torch.sigmoid(z), torch.relu(x), y

    ops = [
        MatcherNode(
            "a", [None], [torch.relu], lambda node, _: node.name != "relu_9" or "of its name", outside_users=False
        ),
        MatcherNode("b", ["a"], [torch.sigmoid]),
    ]
    register_schedule("swap", stage="simplify")(
        rewriter(ops, lambda s, n, m, model, i: model.graph.call_function(torch.tanh, n["b"].args), done="swapped")
    )
    model, _, _ = captured(forward)
    (result,) = [r for r in run_stage(model, "simplify") if r.name == "swap"]
    assert result.modified
    assert result.notes == ["swapped sigmoid_1", "not swapped: sigmoid, relu is also read by neg, output"]


def test_a_checker_gives_its_reason_only_where_all_the_rest_matches():
    ops = [
        MatcherNode(
            "a", [None], [nn.Linear], lambda node, module: module.bias is not None or f"{node.target} has no bias"
        ),
        MatcherNode("b", ["a"], [torch.relu]),
    ]
    joint = [(("a", "b"), lambda a, b, modules: modules["a"].out_features == 3 or "it is too wide")]
    model, _, _ = captured(
        lambda self, x: torch.relu(self.one(x)) + torch.neg(self.two(x)) + torch.relu(self.three(x)).sum(1, True),
        one=nn.Linear(3, 3, bias=False),
        two=nn.Linear(3, 3, bias=False),
        three=nn.Linear(3, 5, bias=False),
    )
    register_schedule("swap", stage="simplify")(rewriter(ops, None, joint=joint))
    (result,) = [r for r in run_stage(model, "simplify") if r.name == "swap"]
    assert not result.modified
    assert result.notes == [
        "not replaced: relu, one has no bias",
        "not replaced: relu_1, three has no bias; it is too wide",
    ]


def test_what_is_known_of_new_nodes():
    def forward(self, x):
        batch = x.size(0)
        left, right = torch.relu(x).chunk(2, dim=1)
        return torch.sigmoid(left.reshape(batch, -1)) + right

    def action(self, nodes, modules, model, index):
        graph, (old,) = model.graph, nodes["a"].args
        parts = graph.call_method("chunk", (old.args[0], 2, 1))
        part = graph.call_function(operator.getitem, (parts, 1))
        sized = graph.call_method("reshape", (part, old.args[1], 1, -1))
        linear = graph.call_module(self.add_module(model, "new", nn.Linear(1, 5)), (sized,))
        shape = graph.call_method("size", (linear, -1))
        odd = graph.call_function(input, ())
        return graph.call_function(fold, (nodes["a"], linear, shape, odd))

    model, _, _ = captured(forward, torch.randn(3, 4))
    scope = {n: facts(n).scope for n in model.graph.nodes if n.target is torch.sigmoid}
    assert rewriter([MatcherNode("a", [None], [torch.sigmoid])], action)().apply(model)
    new = {n.name: facts(n) for n in model.graph.nodes if facts(n).replaces}
    shapes = {name: known.tensor and known.tensor.shape for name, known in new.items()}
    assert shapes == {
        "chunk_1": None,
        "getitem_2": (3, 1),
        "reshape_1": (3, 1, 1),
        "new": (3, 1, 5),
        "size_1": None,
        "input_1": None,
        "fold": (3, 2),
    }
    assert new["size_1"].plain is True
    assert new["chunk_1"].plain is new["input_1"].plain is False
    assert all(known.scope == next(iter(scope.values())) for known in new.values())


def fold(x, *rest):
    return x


@pytest.mark.parametrize(
    ("checker", "joint", "message"),
    [
        (lambda node, module: module.dim, [], "checker of 'b', at relu, failed: AttributeError: .*'dim'"),
        (
            None,
            [(("a", "b"), lambda a, b, modules: modules["c"])],
            "of 'a', 'b', at relu, relu_1, failed: KeyError: 'c'",
        ),
        (None, [(("a", "b"), lambda a, modules: True)], "of 'a', 'b', at relu, relu_1, failed: TypeError"),
    ],
)
def test_a_checker_that_fails_is_named_with_its_place(checker, joint, message):
    ops = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.relu], checker)]
    register_schedule("wrong", stage="simplify")(rewriter(ops, None, joint=joint))
    with pytest.raises(ScheduleError, match="the schedule 'wrong': the .*" + message):
        run_stage(captured(lambda self, x: torch.relu(torch.relu(x)))[0], "simplify")


# ---------------------------------------------------------------------------------- rewrites that keep the meaning


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
def test_a_right_rewrite_keeps_the_meaning_of_any_graph_and_leaves_nothing_to_do(rule, strategy):
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
    """Sums, negations and absolute values of an input, all of which its output needs."""
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
