"""The matcher: every match that a brute-force search finds, and no other; patterns that cannot be are refused."""

import itertools
import operator
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.graph import InputMatchingType, InputMatchType, Matcher, MatcherNode, MatchingNode, Pattern
from bitwright.graph.match import GraphIndex
from bitwright.nn import QuantConv2d

ALL, SUBSET, COMMUTATIVE = InputMatchType.ALL, InputMatchType.SUBSET, InputMatchType.COMMUTATIVE


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


# ------------------------------------------------------------------------------------ against brute force


def add_kw(input, other):
    return input + other


def triple(a, b, c):
    return a + b + c


fx.wrap("add_kw")
fx.wrap("triple")

UNARY = [torch.relu, torch.sigmoid]
BINARY = [operator.add, torch.matmul, add_kw]


def random_graph(chance, size):
    """A graph of few kinds of calls, with shared inputs, equal inputs, keywords in any order, lists and dead ends."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"in{i}") for i in range(chance.randint(1, 2))]
    pick = lambda: chance.choice(nodes[-5:])  # noqa: E731
    for _ in range(size):
        kind = chance.randrange(6)
        if kind < 2:
            nodes.append(graph.call_function(chance.choice(UNARY), (pick(),)))
        elif kind == 2:
            nodes.append(graph.call_method("relu", (pick(),)))
        elif kind == 3:
            nodes.append(graph.call_function(torch.cat, ([pick() for _ in range(chance.randint(1, 3))],)))
        else:
            function = chance.choice([*BINARY, triple])
            slots = {operator.add: ("a", "b"), triple: ("a", "b", "c")}.get(function, ("input", "other"))
            given = {slot: pick() for slot in slots}
            if function in (add_kw, triple, torch.matmul) and chance.random() < 0.5:
                cut = chance.randint(0, len(slots))
                rest = list(slots[cut:])
                chance.shuffle(rest)
                args, kwargs = tuple(given[s] for s in slots[:cut]), {s: given[s] for s in rest}
            else:
                args, kwargs = tuple(given.values()), {}
            node = graph.call_function(function, args, kwargs)
            node.meta["in order"] = list(given.values())
            nodes.append(node)
    graph.output(nodes[-1])
    return fx.GraphModule(nn.Module(), graph)


def parity_differs(a, b, modules):
    assert isinstance(modules, dict)
    return len(a.name) % 2 != len(b.name) % 2


def random_pattern(chance, size):
    """A pattern whose nodes are connected somehow: trees, diamonds, several anchors, or only by a joint checker."""
    nodes, used = [], []
    for i in range(size):
        name = f"n{i}"
        arity = chance.randint(0, 3)
        inputs = [chance.choice([None, *used]) if used else None for _ in range(arity)]
        types = [torch.relu, torch.sigmoid, "relu", operator.add, torch.matmul, add_kw, triple, torch.cat]
        wanted = None if chance.random() < 0.2 else chance.sample(types, chance.randint(1, 5))
        checker = (lambda node, _: len(node.name) % 3 != 0) if chance.random() < 0.2 else None
        nodes.append(
            MatcherNode(
                name,
                None if chance.random() < 0.05 else inputs,
                wanted,
                checker,
                chance.choice([ALL, SUBSET, COMMUTATIVE]),
                outside_users=chance.random() < 0.8,
            )
        )
        used.append(name)
    joint = []
    if size > 1 and chance.random() < 0.5:
        joint.append((tuple(chance.sample(used, 2)), parity_differs))
    return nodes, joint


def pattern_within(chance, model, size):
    """A pattern cut out of a graph, so that it occurs there at least once, with some of it blurred."""
    nodes = [chance.choice([n for n in model.graph.nodes if n.op != "output"])]
    while len(nodes) < size:
        near = [n for m in nodes for n in (*m.users, *actual_inputs(m)) if n not in nodes and n.op != "output"]
        if not near:
            break
        nodes.append(chance.choice(near))
    label = {node: f"n{i}" for i, node in enumerate(nodes)}
    pattern = []
    for node in nodes:
        inputs = [label.get(i) if chance.random() < 0.9 else None for i in actual_inputs(node)]
        kind = chance.choice([ALL, SUBSET, COMMUTATIVE])
        if kind is not ALL:
            chance.shuffle(inputs)
        if kind is SUBSET:
            inputs = inputs[: chance.randint(0, len(inputs))]
        wanted = None if node.op == "placeholder" or chance.random() < 0.2 else [node.target, torch.relu]
        pattern.append(MatcherNode(label[node], inputs, wanted, input_match_type=kind))
    order = chance.sample(pattern, len(pattern))
    return order, [(("n0", "n1"), parity_differs)] if len(pattern) > 1 and chance.random() < 0.3 else []


def actual_inputs(node):
    if "in order" in node.meta:
        return node.meta["in order"]
    return [a for arg in node.args for a in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(a, fx.Node)]


def brute_force(model, nodes, joint):
    """Every injective assignment that fulfils the pattern by its definition, with no cleverness at all."""
    everything = list(model.graph.nodes)
    pattern = {n.name: n for n in nodes}
    read = {i for n in nodes for i in n.inputs or ()}
    found = set()
    possible = [[g for g in everything if alone_fits(n, g)] for n in nodes]
    for choice in itertools.product(*possible):
        if len(set(choice)) < len(choice):
            continue
        chosen = dict(zip(pattern, choice, strict=True))
        if not all(inputs_fit(pattern[name], actual_inputs(node), chosen) for name, node in chosen.items()):
            continue
        if not all(f(*(chosen[n] for n in given), dict.fromkeys(given)) for given, f in joint):
            continue
        inner = [(pattern[n], g) for n, g in chosen.items() if n in read]
        if all(p.outside_users or set(g.users) <= set(choice) for p, g in inner):
            found.add(choice)
    return found


def alone_fits(wanted, node):
    fits = any(t is None or t is node.target or (t == "relu" and node.target == "relu") for t in wanted.op_type)
    return fits and (wanted.checker is None or wanted.checker(node, None))


def inputs_fit(wanted, actual, chosen):
    if wanted.inputs is None:
        return True
    if wanted.input_match_type is not SUBSET and len(actual) != len(wanted.inputs):
        return False
    positions = range(len(actual))
    orders = [tuple(positions)] if wanted.input_match_type is ALL else itertools.permutations(positions)
    return any(
        len(order) >= len(wanted.inputs)
        and all(i is None or actual[p] is chosen[i] for i, p in zip(wanted.inputs, order, strict=False))
        for order in orders
    )


@pytest.mark.parametrize("part", range(10))
def test_it_finds_what_brute_force_finds(part):
    chance = random.Random(part)
    graphs = matches = refused = several = 0
    while graphs < 300:
        model = random_graph(chance, chance.randint(2, 9))
        size = chance.randint(1, 4)
        cut = chance.random() < 0.5
        nodes, joint = pattern_within(chance, model, size) if cut else random_pattern(chance, size)
        try:
            pattern = Pattern(nodes, joint)
        except ConfigError:
            refused += 1
            continue
        graphs += 1
        found = [m.key for m in Matcher(pattern).find(GraphIndex(model))]
        assert len(set(found)) == len(found), "a match was found twice"
        assert set(found) == brute_force(model, nodes, joint), (model.graph, nodes, joint)
        matches += len(found) > 0
        several += len(pattern.anchors) > 1 and len(found) > 0
    assert matches > 80
    assert several > 10
    assert refused > 0


def test_the_steps_grow_with_the_model_and_not_faster():
    def steps(blocks):
        graph = fx.Graph()
        x = graph.placeholder("x")
        for _ in range(blocks):
            y = graph.call_function(torch.relu, (graph.call_function(operator.add, (x, x)),))
            x = graph.call_function(operator.add, (graph.call_function(torch.sigmoid, (y,)), y))
        graph.output(x)
        diamond = [
            MatcherNode("in", [None], [torch.relu]),
            MatcherNode("gate", ["in"], [torch.sigmoid]),
            MatcherNode("sum", ["in", "gate"], [operator.add], input_match_type=COMMUTATIVE),
        ]
        matcher = Matcher(Pattern(diamond))
        found = list(matcher.find(GraphIndex(fx.GraphModule(nn.Module(), graph))))
        assert len(found) == blocks
        return matcher.steps

    few, many = steps(50), steps(500)
    assert many <= 10 * few + 50


# ------------------------------------------------------------------------------------------ by example


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
        (lambda: Pattern(["a"]), "consists of MatcherNodes, not 'a'"),
        (lambda: node(""), "name must be a text that is not empty, not ''"),
        (lambda: node(inputs="xy"), "inputs of 'a' must be a list of names or None, not the text 'xy'"),
        (lambda: node(inputs=[3]), "inputs of 'a' must be names or None, not 3"),
        (lambda: node(op_type=[]), "op_type of 'a' is empty"),
        (lambda: node(op_type=[3]), "op_type of 'a' must hold module classes, .* not 3"),
        (lambda: node(op_type=["relo"]), "'relo', which is not a method of a tensor: did you mean .*'relu'"),
        (lambda: node(op_type="op:conv2"), "unknown operator 'op:conv2': did you mean 'op:conv2d'"),
        (lambda: MatcherNode("a", [], None, 3), "checker of 'a' must be a function, not 3"),
        (lambda: MatcherNode("a", [], None, None, "ALL"), "must be one of InputMatchType .* not 'ALL'"),
        (lambda: Pattern([node(), node()]), "several nodes called 'a'"),
        (
            lambda: Pattern([node("one"), node("b", ["ome"])]),
            "'ome' of 'b' is not a node of the .*: did you mean 'one'",
        ),
        (lambda: Pattern([node("a", ["b"]), node("b", ["a"])]), "round in a circle: 'a', 'b'"),
        (lambda: Pattern([node("a", ["a"])]), "round in a circle: 'a'"),
        (lambda: Pattern([node(n) for n in "ab"]), r"falls apart into \(a\) and \(b\); join them"),
        (
            lambda: Pattern([node("a"), node("b", ["a"]), node("c"), node("d", ["c"])]),
            r"falls apart into \(a, b\) and \(c, d\)",
        ),
        (lambda: Pattern([node()], [(("a", "c"), print)]), "a joint checker names .c., not a node of the pattern"),
        (lambda: Pattern([node()], ["a"]), r"a joint checker is a tuple \(names, function\), not 'a'"),
        (lambda: Pattern([node()], [("a", 3)]), r"a joint checker is a tuple .* not \('a', 3\)"),
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
