"""Demand: which tensors must be quantized, how, for which users, and which of them with one scale."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from bitwright.graph import CapturedModel
from bitwright.prepare.build import build, needed_spec
from bitwright.prepare.decide import Decision, is_float, node_name
from bitwright.prepare.ledger import Verdict
from bitwright.prepare.swap import put_submodule
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import TensorRecipe

QUANTIZERS = "activation_quantizers"
Key = tuple[fx.Node, str]  # a tensor, and how it is quantized


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
        self.requests: dict[Key, _Request] = {}
        self.of_tensor: dict[fx.Node, list[Key]] = defaultdict(list)
        self.parent: dict[Key, Key] = {}

    def walk(self, tensor: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Go from a tensor back over operators that only move values, to where the values come into being."""
        start, first_user = tensor, None
        while (decision := self.decisions.get(tensor)) is not None and decision.verdict is Verdict.CARRIED:
            before = tensor.args[0] if tensor.args else None
            if not isinstance(before, fx.Node) or before.meta.get("written"):
                break
            tensor, first_user = before, tensor
        return (tensor, first_user) if is_float(tensor) else (start, None)

    def input(self, user: fx.Node, tensor: fx.Node, decision: Decision) -> Key | None:
        """Ask for the tensor that ``user`` reads; return what it got, or None where the tensor shall stay float."""
        source, first_user = self.walk(tensor)
        if source in self.by_hand:
            return source, ""
        recipe = decision.wishes.input
        producer = self._producer(source)
        if producer is not None and not decision.insists("input"):
            recipe = producer.wishes.output
            if recipe.floating:
                return None
        taker = first_user or user
        key = (source, _text(recipe))
        if any(taker in self.requests[other].users for other in self.of_tensor[source] if other != key):
            key, taker = (tensor, key[1]), user  # what moves the values has them quantized otherwise
        self._ask(key, recipe).users.add(taker)
        return key

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

    def share_inputs_of_repeated_layers(self, inputs_of: dict[fx.Node, list[Key]]) -> None:
        """A layer called several times has one input quantizer, so that its bias has one scale."""
        calls: dict[object, list[Key]] = defaultdict(list)
        for node, inputs in inputs_of.items():
            if node.op == "call_module":
                calls[node.target] += inputs
        for inputs in calls.values():
            self.share(inputs)

    def insert(self, model: CapturedModel, prefix: str) -> dict[Key, TensorQuantizer]:
        """Put the quantizers into the graph; return the one of every request."""
        order = {node: i for i, node in enumerate(model.graph.nodes)}
        placed: dict[Key, TensorQuantizer] = {(node, ""): quantizer for node, quantizer in self.by_hand.items()}
        names: dict[Key, str] = {}
        for tensor in sorted((t for t, keys in self.of_tensor.items() if keys), key=order.__getitem__):
            readers = {key: self._readers(key, order) for key in self.of_tensor[tensor]}
            for key, users in readers.items():
                root = self.find(key)
                if root not in names:
                    names[root] = f"{QUANTIZERS}.{_name(key, users, first=key == self.of_tensor[tensor][0])}"
                    label = f"{prefix}.{node_name(tensor)}" if prefix else node_name(tensor)
                    recipe = self.requests[root].recipe
                    put_submodule(model, names[root], build(recipe, needed_spec(recipe), f"output of {label}"))
                with model.graph.inserting_after(tensor):
                    suffix = names[root].rpartition(".")[2].removeprefix(tensor.name) if root == key else ""
                    name = f"{tensor.name}{suffix}_quantized"
                    call = model.graph.create_node("call_module", names[root], (tensor,), name=name)
                call.meta.update(tensor.meta)
                for user in users:
                    user.replace_input_with(tensor, call)
                placed[key] = model.get_submodule(names[root])  # pyrefly: ignore
        return placed

    def _readers(self, key: Key, order: dict[fx.Node, int]) -> list[fx.Node]:
        """Who reads a quantized tensor: others keep a float operator's result, an integer one has only integers."""
        tensor = key[0]
        others = {u for k in self.of_tensor[tensor] if k != key for u in self.requests[k].users}
        readers = set(self.requests[key].users)
        decision = self.decisions.get(tensor)
        if key == self.of_tensor[tensor][0] and decision is not None and not decision.keeps_float_result:
            readers = {u for u in tensor.users if not self._wants_float(u)}
        if key == self.of_tensor[tensor][0]:
            readers -= others
        return sorted(readers, key=lambda n: order.get(n, len(order)))

    def _wants_float(self, user: fx.Node) -> bool:
        decision = self.decisions.get(user)
        return decision is not None and decision.insists("input") and decision.wishes.input.floating


def _text(recipe: TensorRecipe) -> str:
    return recipe.model_dump_json()


def _name(key: Key, users: list[fx.Node], *, first: bool) -> str:
    return key[0].name if first or not users else f"{key[0].name}_for_{users[0].name}"
