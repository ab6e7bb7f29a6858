"""The engine of schedules: what get_new_graph may return, what is removed, what is known of new nodes, near misses."""

import operator

import pytest
import torch
from torch import fx, nn

from bitwright.errors import ConfigError, ScheduleError
from bitwright.graph import (
    MatcherNode,
    ReplaceStrategy,
    register_schedule,
    run_stage,
)
from bitwright.graph.facts import facts, shape_of
from tests.graph.rewriting.rewriters import PAIR, captured, chain, rewriter, targets

pytestmark = pytest.mark.usefixtures("own_plugins")


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
        (lambda n, g: {"a": "relu"}, "replaces 'a' with 'relu', which is not a node of the model's graph"),
        (lambda n, g: fx.Graph().placeholder("x"), "which is not a node of the model's graph"),
        (lambda n, g: 1 / 0, "failed in get_new_graph at relu_1: ZeroDivisionError: division by zero"),
        (lambda n, g: {"a": n["b"].users and next(iter(n["b"].users))}, "read each other in a cycle"),
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


def cut_in_two(self, nodes, modules, model, index):
    x = nodes["a"].args[0]
    return [model.graph.call_function(torch.narrow, (x, 1, start, 2)) for start in (0, 2)]


@pytest.mark.parametrize("whole", [True, False])
def test_a_call_with_several_results_is_replaced_by_a_tuple_of_nodes(whole):
    def forward(self, x):
        parts = x.chunk(2, 1)
        return torch.relu(parts[0]), (torch.cat(parts) if whole else parts[-1]), torch.sigmoid(parts[0])

    model, net, x = captured(forward, torch.randn(3, 4))
    assert rewriter([MatcherNode("a", [None], ["chunk"])], cut_in_two)().apply(model)
    model.graph.lint()
    assert not {"chunk", "getitem"} & set(targets(model))
    assert [shape_of(n) for n in model.graph.nodes if n.target is torch.narrow] == [(3, 2)] * 2
    assert all(torch.equal(got, wanted) for got, wanted in zip(model(x), net(x), strict=True))


def test_results_that_nobody_reads_need_no_node():
    model, net, x = captured(lambda self, x: x.chunk(3, 1)[1], torch.randn(3, 6))
    action = lambda s, n, m, model, i: (None, model.graph.call_function(torch.narrow, (n["a"].args[0], 1, 2, 2)), None)  # noqa: E731
    rewriter([MatcherNode("a", [None], ["chunk"])], action)().apply(model)
    assert targets(model) == ["narrow"]
    assert torch.equal(model(x), net(x))


def test_a_schedule_looks_at_the_model_first_and_does_the_rest_last():
    log = []

    def begin(self, model):
        self.count = len(model.graph.nodes)
        log.append(f"{self.count} nodes")

    def finish(self, model):
        self.note(f"{len(model.graph.nodes)} nodes of {self.count} are left")

    ops = [MatcherNode("a", [None], [torch.relu], lambda node, _: log.append(node.name) or True)]
    schedule = rewriter(
        ops, lambda s, n, m, model, i: n["a"].args[0], ReplaceStrategy.APPLY_NOINTERSECT, begin=begin, finish=finish
    )
    register_schedule("all_gone", stage="simplify")(schedule)
    model, _, _ = captured(lambda self, x: torch.neg(torch.relu(torch.relu(x))))
    (result,) = [r for r in run_stage(model, "simplify") if r.name == "all_gone"]
    assert log[0] == "5 nodes"
    assert result.notes[-1] == "3 nodes of 5 are left"


@pytest.mark.parametrize("hook", ["begin", "finish"])
def test_a_hook_that_fails_is_named(hook):
    schedule = rewriter([MatcherNode("a", [None], [torch.tanh])], None, **{hook: lambda self, model: 1 / 0})
    with pytest.raises(ScheduleError, match=f"failed in {hook}: ZeroDivisionError"):
        schedule().apply(captured(chain)[0])


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
