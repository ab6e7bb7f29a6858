"""The matcher finds every match that a brute-force search finds, and no other, in a time that grows with the graph."""

import itertools
import operator
import random

import pytest
import torch
from torch import fx, nn

from bitwright.errors import ConfigError
from bitwright.graph import InputMatchType, Matcher, MatcherNode, Pattern
from bitwright.graph.match import GraphIndex

ALL, FIRST, SUBSET, COMMUTATIVE = (InputMatchType[name] for name in ("ALL", "FIRST", "SUBSET", "COMMUTATIVE"))


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
        inputs = None if chance.random() < 0.05 else inputs
        nodes.append(
            MatcherNode(
                name,
                inputs,
                wanted,
                checker,
                chance.choice([ALL, FIRST, SUBSET, COMMUTATIVE]),
                outside_users=chance.random() < 0.8,
                through=random_through(chance, inputs),
            )
        )
        used.append(name)
    joint = []
    if size > 1 and chance.random() < 0.5:
        joint.append((tuple(chance.sample(used, 2)), parity_differs))
    return nodes, joint


def random_through(chance, inputs):
    """Nothing, types, or a function, for a node that names one input."""
    if len([i for i in inputs or () if i is not None]) != 1 or chance.random() < 0.4:
        return ()
    return chance.choice([[torch.relu, "relu"], [torch.sigmoid, operator.add], lambda node, _: len(node.name) % 2 == 0])


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
        kind = chance.choice([ALL, FIRST, SUBSET, COMMUTATIVE])
        if kind in (SUBSET, COMMUTATIVE):
            chance.shuffle(inputs)
        if kind in (SUBSET, FIRST):
            inputs = inputs[: chance.randint(0, len(inputs))]
        wanted = None if node.op == "placeholder" or chance.random() < 0.2 else [node.target, torch.relu]
        through = random_through(chance, inputs)
        pattern.append(MatcherNode(label[node], inputs, wanted, input_match_type=kind, through=through))
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
        chains = [(r.named, chain(r, actual_inputs(chosen[r.name]), chosen)) for r in nodes if r.through != ()]
        inside = {*choice, *(g for _, way in chains for g in way)}
        closed = [n for n in chosen if n in read and not pattern[n].outside_users]
        closed_nodes = [chosen[n] for n in closed] + [g for named, way in chains for g in way if named & set(closed)]
        if all(set(g.users) <= inside for g in closed_nodes):
            found.add(choice)
    return found


def alone_fits(wanted, node):
    fits = any(t is None or t is node.target or (t == "relu" and node.target == "relu") for t in wanted.op_type)
    return fits and (wanted.checker is None or wanted.checker(node, None))


def inputs_fit(wanted, actual, chosen):
    if wanted.inputs is None:
        return True
    if wanted.input_match_type in (ALL, COMMUTATIVE) and len(actual) != len(wanted.inputs):
        return False
    positions = range(len(actual))
    orders = [tuple(positions)] if wanted.input_match_type in (ALL, FIRST) else itertools.permutations(positions)
    return any(
        len(order) >= len(wanted.inputs)
        and all(
            i is None or chosen[i] in passed_on(wanted, actual[p]) for i, p in zip(wanted.inputs, order, strict=False)
        )
        for order in orders
    )


def passed_on(wanted, node):
    """A node, and what it lets through: the first argument of each node that may stand between."""
    found = [node]
    while wanted.through != () and may_be_between(wanted.through, found[-1]):
        given = found[-1].args[0] if found[-1].args else found[-1].kwargs.get("input")
        if not isinstance(given, fx.Node):
            break
        found.append(given)
    return found


def may_be_between(through, node):
    return through(node, None) if callable(through) else node.target in through


def chain(wanted, actual, chosen):
    """What stands between a node and the input that it names, by the first way there is."""
    (name,) = wanted.named
    places = [wanted.inputs.index(name)] if wanted.input_match_type in (ALL, FIRST) else range(len(actual))
    for place in places:
        way = passed_on(wanted, actual[place])
        if chosen[name] in way:
            return way[: way.index(chosen[name])]
    return []


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
