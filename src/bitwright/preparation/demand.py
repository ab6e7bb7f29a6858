"""Demand: which tensors must be quantized, how, for which users, and which of them with one scale."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from bitwright.graph import CapturedModel
from bitwright.graph.facts import copy_facts, facts
from bitwright.graph.names import add_internal, node_name
from bitwright.preparation.build import build, needed_spec
from bitwright.preparation.decide import Decision, is_float
from bitwright.preparation.ledger import Verdict
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import TensorRecipe
from bitwright.spec import PerTensor, QuantSpec

Key = tuple[fx.Node, str]  # a tensor, and how it is quantized


@dataclass
class Edge:
    """A tensor that an operator reads.

    Attributes:
        user: the operator.
        tensor: what it reads.
        source: where the tensor's values come into being.
        carrier: what first moves them on from there, if anything does.
        recipe: how they shall be quantized, or that they stay float.
        key: the request that serves it, once settled; None where they stay float.
    """

    user: fx.Node
    tensor: fx.Node
    source: fx.Node
    carrier: fx.Node | None
    recipe: TensorRecipe
    key: Key | None = None


@dataclass
class _Request:
    recipe: TensorRecipe
    users: set[fx.Node] = field(default_factory=set)


class Demand:
    """Collects requests; those for one tensor that ask for the same are one.

    Where both ends of an edge have an opinion, the reader's rule comes first, then the rule of what computes the
    tensor, then the recipe.
    """

    def __init__(self, decisions: dict[fx.Node, Decision], by_hand: dict[fx.Node, TensorQuantizer]) -> None:
        self.decisions = decisions
        self.by_hand = by_hand
        self.edges: list[Edge] = []
        self.divided: set[fx.Node] = set()  # operators that move values which their readers want quantized differently
        self.requests: dict[Key, _Request] = {}
        self.of_tensor: dict[fx.Node, list[Key]] = defaultdict(list)
        self.parent: dict[Key, Key] = {}

    def walk(self, tensor: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Go from a tensor back over operators that only move values, to where the values come into being."""
        start, first_user = tensor, None
        while (decision := self.decisions.get(tensor)) is not None and decision.verdict is Verdict.CARRIED:
            before = tensor.args[0] if tensor.args else None
            if not isinstance(before, fx.Node) or facts(before).written:
                break
            tensor, first_user = before, tensor
        return (tensor, first_user) if is_float(tensor) else (start, None)

    def input(self, user: fx.Node, tensor: fx.Node, decision: Decision) -> Edge:
        """Ask for the tensor that ``user`` reads."""
        source, carrier = self.walk(tensor)
        recipe = decision.wishes.input
        producer = self._producer(source)
        if producer is not None and not decision.insists("input"):
            recipe = producer.wishes.output
        edge = Edge(user, tensor, source, carrier, recipe)
        self.edges.append(edge)
        return edge

    def settle(self) -> None:
        """Turn edges into requests: where the values come into being, or after what moves them if readers disagree."""
        wishes: dict[fx.Node, set[str]] = defaultdict(set)
        for edge in self.edges:
            if edge.carrier is not None:
                wishes[edge.carrier].add(_text(edge.recipe))
        self.divided = {carrier for carrier, asked in wishes.items() if len(asked) > 1}
        for edge in self.edges:
            if edge.source in self.by_hand and edge.carrier not in self.divided:
                edge.key = (edge.source, "")
            elif not edge.recipe.floating:
                direct = edge.carrier is None or edge.carrier in self.divided
                edge.key = (edge.tensor if direct else edge.source, _text(edge.recipe))
                self._ask(edge.key, edge.recipe).users.add(edge.user if direct or not edge.carrier else edge.carrier)

    def output(self, tensor: fx.Node, recipe: TensorRecipe) -> Key:
        """Ask for a result, for all its users."""
        key = (tensor, _text(recipe))
        self._ask(key, recipe).users.update(tensor.users)
        return key

    def first_request(self, tensor: fx.Node) -> list[Key]:
        """The request that serves all users of a tensor without one of their own, if any."""
        return [(tensor, "")] if tensor in self.by_hand else self.of_tensor.get(tensor, [])[:1]

    def _producer(self, tensor: fx.Node) -> Decision | None:
        """What computes a tensor, if its rule says how the result is quantized."""
        decision = self.decisions.get(tensor)
        if decision is not None and decision.verdict is Verdict.FUSED and not decision.insists("output"):
            decision = self.decisions.get(tensor.all_input_nodes[0])
        return decision if decision is not None and decision.insists("output") else None

    def _ask(self, key: Key, recipe: TensorRecipe) -> _Request:
        if key not in self.requests:
            self.requests[key] = _Request(recipe)
            self.of_tensor[key[0]].append(key)
            self.parent[key] = key
        return self.requests[key]

    def find(self, key: Key) -> Key:
        """The request whose quantizer serves another."""
        while self.parent[key] != key:
            key = self.parent[key]
        return key

    def share(self, keys: list[Key]) -> None:
        """Let several requests have one quantizer."""
        roots = [self.find(k) for k in keys if k in self.parent]
        for root in roots[1:]:
            if root != roots[0]:
                self.parent[root] = roots[0]

    def share_inputs_of_repeated_layers(self) -> None:
        """A layer called several times has one input quantizer, so that its bias has one scale."""
        calls: dict[object, list[Key]] = defaultdict(list)
        for edge in self.edges:
            if edge.user.op == "call_module" and edge.key is not None:
                calls[edge.user.target].append(edge.key)
        for inputs in calls.values():
            self.share(inputs)

    def insert(self, model: CapturedModel, prefix: str) -> dict[Key, TensorQuantizer]:
        """Put the quantizers into the graph; return the one of every request."""
        order = {node: i for i, node in enumerate(model.graph.nodes)}
        placed: dict[Key, TensorQuantizer] = {(node, ""): quantizer for node, quantizer in self.by_hand.items()}
        names: dict[Key, str] = {}
        floating: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for edge in self.edges:
            if edge.recipe.floating:
                floating[edge.tensor].add(edge.user)
        for tensor in sorted((t for t, keys in self.of_tensor.items() if keys), key=order.__getitem__):
            readers = {key: self._readers(key, order, floating[tensor]) for key in self.of_tensor[tensor]}
            for key, users in readers.items():
                root = self.find(key)
                if root not in names:
                    wish = _name(key, users, first=key == self.of_tensor[tensor][0])
                    label = f"{prefix}.{node_name(tensor)}" if prefix else node_name(tensor)
                    recipe = self.requests[root].recipe
                    quantizer = build(recipe, _fitting(recipe, tensor), f"output of {label}")
                    names[root] = add_internal(model, "quantizers", wish, quantizer)
                with model.graph.inserting_after(tensor):
                    suffix = names[root].rpartition(".")[2].removeprefix(tensor.name) if root == key else ""
                    name = f"{tensor.name}{suffix}_quantized"
                    call = model.graph.create_node("call_module", names[root], (tensor,), name=name)
                copy_facts(tensor, call)
                for user in users:
                    user.replace_input_with(tensor, call)
                placed[key] = model.get_submodule(names[root])  # pyrefly: ignore
        return placed

    def _readers(self, key: Key, order: dict[fx.Node, int], floating: set[fx.Node]) -> list[fx.Node]:
        """Who reads a quantized tensor, but for ``floating``: an integer operator's result has no other readers."""
        tensor = key[0]
        readers = set(self.requests[key].users)
        if key == self.of_tensor[tensor][0]:
            others = {u for k in self.of_tensor[tensor][1:] for u in self.requests[k].users}
            decision = self.decisions.get(tensor)
            if decision is not None and decision.verdict is not Verdict.CARRIED and not decision.keeps_float_result:
                readers |= {u for u in tensor.users if u not in self.divided}
            readers -= others | floating
        return sorted(readers, key=lambda n: order.get(n, len(order)))


def _text(recipe: TensorRecipe) -> str:
    return recipe.model_dump_json()


def _name(key: Key, users: list[fx.Node], *, first: bool) -> str:
    return key[0].name if first or not users else f"{key[0].name}_for_{users[0].name}"


def _fitting(recipe: TensorRecipe, tensor: fx.Node) -> QuantSpec:
    """The spec asked for, with one scale for a tensor that has no such axis."""
    spec, info = needed_spec(recipe), facts(tensor).tensor
    axis = getattr(spec.granularity, "axis", None)
    if axis is None or info is None or -len(info.shape) <= axis < len(info.shape):
        return spec
    return spec.with_(granularity=PerTensor())
