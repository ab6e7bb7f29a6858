"""The matcher by example: inputs, types, checkers, chains; patterns that cannot be are refused."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.graph import InputMatchingType, InputMatchType, Matcher, MatcherNode, MatchingNode, Pattern
from bitwright.graph.match import GraphIndex
from bitwright.nn import QuantConv2d
from bitwright.nn.operators import OPERATORS

FIRST, SUBSET = InputMatchType.FIRST, InputMatchType.SUBSET


def find(model, nodes, joint=()):
    return [m.nodes for m in Matcher(Pattern(nodes, joint)).find(GraphIndex(model))]


def names(matches):
    return [{k: n.name for k, n in m.items()} for m in matches]


class Leaves(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return True


def traced(function, **modules):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x):
            return function(self, x)

    net = Net()
    return fx.GraphModule(net, Leaves().trace(net))


def test_equal_inputs_count_twice():
    model = traced(lambda self, x: (lambda y: (y + y, y + torch.neg(y)))(torch.relu(x)))
    relu = MatcherNode("a", [None], [torch.relu])
    assert len(find(model, [MatcherNode("s", [None, None], [operator.add])])) == 2
    assert find(model, [MatcherNode("s", [None], [operator.add])]) == []
    assert names(find(model, [relu, MatcherNode("s", ["a", "a"], [operator.add])])) == [{"a": "relu", "s": "add"}]
    both = [relu, MatcherNode("s", ["a", "a"], [operator.add], input_match_type=SUBSET)]
    assert names(find(model, both)) == [{"a": "relu", "s": "add"}]
    two = [relu, MatcherNode("b", [None], None), MatcherNode("s", ["a", "b"], [operator.add])]
    assert names(find(model, two)) == [{"a": "relu", "b": "neg", "s": "add_1"}]


def test_keyword_arguments_stand_where_the_signature_has_them():
    def forward(self, x):
        weight = torch.sigmoid(x)
        bias = torch.tanh(x)
        y = F.conv2d(bias=bias, weight=weight, input=x)
        return F.layer_norm(bias=bias, input=y, normalized_shape=(3,), weight=weight), self.mix(late=x, early=y)

    class Mix(nn.Module):
        def forward(self, early, late):
            return early + late

    model = traced(forward, mix=Mix())
    weight, bias = MatcherNode("w", [None], [torch.sigmoid]), MatcherNode("b", [None], [torch.tanh])
    assert len(find(model, [weight, bias, MatcherNode("c", [None, "w", "b"], [F.conv2d])])) == 1
    assert find(model, [weight, bias, MatcherNode("c", [None, "b", "w"], [F.conv2d])]) == []
    assert len(find(model, [weight, bias, MatcherNode("c", [None, "w", "b"], [F.layer_norm])])) == 1
    conv = MatcherNode("c", None, [F.conv2d])
    assert len(find(model, [conv, MatcherNode("m", ["c", None], [Mix])])) == 1
    assert find(model, [conv, MatcherNode("m", [None, "c"], [Mix])]) == []


def test_inputs_within_lists_and_slices():
    model = traced(lambda self, x: torch.cat([torch.relu(x), x[: x.size(0)], x], dim=0))
    size = MatcherNode("n", [None], ["size"])
    assert len(find(model, [size, MatcherNode("i", [None, "n"], [operator.getitem])])) == 1
    relu = MatcherNode("r", [None], [torch.relu])
    assert len(find(model, [relu, MatcherNode("c", ["r", None, None], [torch.cat])])) == 1


def test_the_first_inputs_alone():
    model = traced(lambda self, x: F.linear(torch.relu(x), torch.sigmoid(x), torch.tanh(x)))
    relu, gate = MatcherNode("r", [None], [torch.relu]), MatcherNode("s", [None], [torch.sigmoid])
    assert len(find(model, [relu, MatcherNode("l", ["r"], [F.linear], input_match_type=FIRST)])) == 1
    assert len(find(model, [relu, gate, MatcherNode("l", ["r", "s"], [F.linear], input_match_type=FIRST)])) == 1
    assert find(model, [gate, MatcherNode("l", ["s"], [F.linear], input_match_type=FIRST)]) == []
    four = [relu, MatcherNode("l", ["r", None, None, None], [F.linear], input_match_type=FIRST)]
    assert find(model, four) == []


# -------------------------------------------------------------------------------------------- through chains


def through_chain(self, x):
    y = torch.relu(x).reshape(-1).unsqueeze(0)
    return torch.neg(y.t()) + torch.neg(torch.sigmoid(x)) + y.sum()


def test_a_node_is_found_through_any_number_of_others():
    model = traced(through_chain)
    relu = MatcherNode("a", [None], [torch.relu, torch.sigmoid])
    for through, found in [
        ((), ["sigmoid"]),
        (["reshape", "unsqueeze"], ["sigmoid"]),
        (["op:reshape", "unsqueeze", "t"], ["relu", "sigmoid"]),
        (lambda node, _: node.op == "call_method", ["relu", "sigmoid"]),
    ]:
        nodes = [relu, MatcherNode("b", ["a"], [torch.neg], through=through)]
        assert [m["a"] for m in names(find(model, nodes))] == found


def test_a_chain_belongs_to_the_match():
    model = traced(through_chain)
    (match,) = Matcher(
        Pattern(
            [
                MatcherNode("a", [None], [torch.relu], outside_users=False),
                MatcherNode("b", ["a"], [torch.neg], through=lambda node, _: node.op == "call_method"),
            ]
        )
    ).find_near(GraphIndex(model))
    assert match.reasons == ("unsqueeze is also read by sum_1",)  # and not: relu is also read by reshape


def test_the_nearest_is_tried_first():
    model = traced(lambda self, x: torch.neg(torch.relu(torch.relu(torch.relu(x)))))
    nodes = [MatcherNode("a", None, [torch.relu]), MatcherNode("b", ["a"], [torch.neg], through=[torch.relu])]
    assert [m["a"] for m in names(find(model, nodes))] == ["relu_2", "relu_1", "relu"]


def test_chains_are_followed_forwards_too():
    def body(self, x):
        y = torch.relu(x)
        return torch.neg(y.t().t()) + torch.sigmoid(y)

    nodes = [
        MatcherNode("a", [None], [torch.relu]),
        MatcherNode("b", ["a"], [torch.neg], through=["t"]),
        MatcherNode("c", ["a"], [torch.sigmoid]),
    ]
    model = traced(body)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        assert names(find(model, [nodes[i] for i in order]))[0]["b"] == "neg"


class Wide(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("op_type", "subclasses", "found"),
    [
        ([nn.Linear], False, ["a"]),
        (nn.Linear, False, ["a"]),
        ([nn.Linear], True, ["a", "b"]),
        ([nn.Module], True, ["a", "b"]),
        ([Wide, torch.relu], False, ["b", "relu_1"]),
        (["relu"], False, ["relu"]),
        ([torch.Tensor.relu], False, ["relu"]),
        (["op:relu"], False, ["relu", "relu_1"]),
        (["op:linear"], False, ["a", "b"]),
        (OPERATORS.get("relu"), False, ["relu", "relu_1"]),
        ([o for o in OPERATORS.values() if o.weight], False, ["a", "b"]),
        (["placeholder"], False, ["x"]),
        (["output"], False, ["output"]),
        (["get_attr"], False, ["a_weight"]),
        ([nn.Parameter], False, ["a_weight"]),
        (None, False, ["x", "a", "b", "relu", "a_weight", "add", "relu_1", "output"]),
    ],
)
def test_what_a_node_calls(op_type, subclasses, found):
    model = traced(
        lambda self, x: torch.relu(self.b(self.a(x)).relu() + self.a.weight), a=nn.Linear(2, 2), b=Wide(2, 2)
    )
    nodes = [MatcherNode("n", None, op_type, subclasses=subclasses)]
    assert [m["n"].name for m in find(model, nodes)] == found


def test_a_qmodule_answers_to_the_class_it_stands_for():
    model = bw.prepare(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), torch.randn(1, 1, 2, 2))
    for op_type in ([nn.Conv2d], [QuantConv2d], ["op:conv2d"]):
        assert len(find(model, [MatcherNode("c", [None], op_type)])) == 1
    assert find(model, [MatcherNode("c", [None], [nn.Conv1d])]) == []


def test_a_checker_is_given_the_instance():
    model = traced(lambda self, x: torch.relu(self.a(x)) + self.a.weight, a=nn.Linear(2, 2))
    seen = {}

    def look(node, module):
        seen[node.name] = module
        return True

    find(model, [MatcherNode("n", None, None, look)])
    assert seen["a"] is model.a
    assert seen["relu"] is torch.relu
    assert seen["a_weight"] is model.a.weight
    assert seen["x"] is None


def test_joint_checkers_get_modules_by_node_name_in_whatever_order_the_names_are():
    model = traced(lambda self, x: self.b(self.a(x)), a=nn.Linear(2, 3), b=nn.Linear(3, 4))
    nodes = [MatcherNode("first", [None], [nn.Linear]), MatcherNode("second", ["first"], [nn.Linear])]
    seen = []

    def by_keyword(second, first, *, modules):
        seen.append((second.name, first.name, modules))
        return True

    def by_position(second, first, instances, /):
        return instances["second"].out_features == 4 and instances["first"].out_features == 3

    names_given = ("second", "first")
    assert len(find(model, nodes, [(names_given, by_keyword), (names_given, by_position)])) == 1
    assert seen == [("b", "a", {"second": model.b, "first": model.a})]
    assert find(model, nodes, [(("first",), lambda first, modules: modules["first"].out_features == 4)]) == []


def test_a_later_match_is_found_where_the_first_candidate_fails():
    """The case that an older engine missed: the joint checker is true of the second of two chains only."""
    model = traced(lambda self, x: torch.neg(torch.relu(x)) + torch.neg(torch.relu(torch.sigmoid(x))))
    nodes = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.neg])]
    joint = [(("a", "b"), lambda a, b, modules: a.args[0].name == "sigmoid")]
    assert names(find(model, nodes, joint)) == [{"a": "relu_1", "b": "neg_1"}]


def test_outside_users_are_accepted_or_refused_as_the_pattern_says():
    model = traced(lambda self, x: (lambda y: torch.neg(y) + y)(torch.relu(x)))
    for allowed, found in [(True, 1), (False, 0)]:
        nodes = [MatcherNode("a", [None], [torch.relu], outside_users=allowed), MatcherNode("b", ["a"], [torch.neg])]
        assert len(find(model, nodes)) == found
    # A user that belongs to the match is none from outside.
    nodes.append(MatcherNode("c", ["b", "a"], [operator.add]))
    assert len(find(model, nodes)) == 1


def test_the_later_spelling():
    assert MatchingNode is MatcherNode
    assert InputMatchingType.SUBSET is InputMatchType.SUBSET
    assert InputMatchType.ANY_ORDER is InputMatchType.COMMUTATIVE


def node(name="a", inputs=(), op_type=torch.relu, *rest):
    return MatcherNode(name, inputs, op_type, *rest)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern([]), "needs at least one MatcherNode"),
        (lambda: Pattern(["a"]), "must consist of MatcherNodes, not 'a'"),
        (lambda: node(""), "name must be a non-empty string, not ''"),
        (lambda: node(inputs="xy"), "inputs of 'a' must be a list of names or None, not the string 'xy'"),
        (lambda: node(inputs=[3]), "inputs of 'a' must be names or None, not 3"),
        (lambda: node(op_type=[]), "op_type of 'a' is empty"),
        (lambda: node(op_type=[3]), "op_type of 'a' must hold module classes, .* not 3"),
        (lambda: node(op_type=["relo"]), "'relo', which is not a method of a tensor: did you mean .*'relu'"),
        (lambda: node(op_type="op:conv2"), "unknown operator 'op:conv2': did you mean 'op:conv2d'"),
        (lambda: MatcherNode("a", [], None, 3), "checker of 'a' must be a function, not 3"),
        (lambda: MatcherNode("a", [], None, None, "ALL"), "must be one of InputMatchType .* not 'ALL'"),
        (lambda: MatcherNode("a", [], through=["relu"]), "'a' has `through`, so its inputs must name one node, not 0"),
        (lambda: MatcherNode("a", ["b"], through=[4]), "the through of 'a' must hold module classes, .* not 4"),
        (lambda: MatcherNode("a", ["b"], through=["relo"]), "the through of 'a' has 'relo', which is not a method"),
        (lambda: Pattern([node(), node()]), "several nodes called 'a'"),
        (
            lambda: Pattern([node("one"), node("b", ["ome"])]),
            "'ome' of 'b' is not a node of the .*: did you mean 'one'",
        ),
        (lambda: Pattern([node("a", ["b"]), node("b", ["a"])]), "form a cycle: 'a', 'b'"),
        (lambda: Pattern([node("a", ["a"])]), "form a cycle: 'a'"),
        (lambda: Pattern([node(n) for n in "ab"]), r"in separate pieces, \(a\) and \(b\); join them"),
        (
            lambda: Pattern([node("a"), node("b", ["a"]), node("c"), node("d", ["c"])]),
            r"in separate pieces, \(a, b\) and \(c, d\)",
        ),
        (lambda: Pattern([node()], [(("a", "c"), print)]), "a joint checker names .c., not a node of the pattern"),
        (lambda: Pattern([node()], ["a"]), r"a joint checker must be a tuple \(names, function\), not 'a'"),
        (lambda: Pattern([node()], [("a", 3)]), r"a joint checker must be a tuple .* not \('a', 3\)"),
    ],
)
def test_patterns_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_blocks_may_be_joined_by_a_joint_checker():
    model = traced(lambda self, x: torch.relu(x) + torch.neg(x) * torch.relu(torch.neg(x)))
    joint = [(("a", "b"), lambda a, b, modules: a.args[0] is b.args[0])]
    nodes = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", [None], [torch.neg])]
    assert names(find(model, nodes, joint)) == [{"a": "relu", "b": "neg"}, {"a": "relu", "b": "neg_1"}]
