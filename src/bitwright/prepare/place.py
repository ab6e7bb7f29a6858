"""Place quantizers on edges: one per tensor, shared where the backend needs it, none where values only move.

A tensor is quantized where it comes into being, not where it is used: a max-pool or reshape between its
producer and an integer operator carries the producer's scale on. All calls of one layer share the quantizer
of its input.
"""

import contextlib
from collections import defaultdict

from torch import fx

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.graph import CapturedModel
from bitwright.nn.mixins import QuantInputMixin
from bitwright.prepare.decide import Decision, is_float, node_name, operands, tensor_recipes
from bitwright.prepare.ledger import Verdict
from bitwright.prepare.swap import build, put_submodule
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, TensorRecipe

QUANTIZERS = "activation_quantizers"


def place(
    model: CapturedModel, decisions: dict[fx.Node, Decision], recipe: Recipe, backend: Backend, prefix: str
) -> None:
    """Insert activation quantizers into the graph and tell the QModules about them."""
    demand = _Demand(decisions, _placed_by_hand(model, backend))
    inputs_of: dict[fx.Node, list[fx.Node]] = {}
    for node, decision in decisions.items():
        if decision.verdict is not Verdict.INTEGER or (decision.operator is None and decision.custom is None):
            continue
        _, activation = tensor_recipes(decision, recipe, backend)
        backend.check_activation(_spec(activation), f"the input of {decision.entry.name}")
        inputs_of[node] = [demand.input(node, o, activation) for o in operands(node, decision.operator)]
        end = _end_of_group(node, decisions)
        if _result_quantized(decision, backend):
            demand.output(end, activation)
        if decision.custom is None and decision.entry.operator in backend.share_inputs:
            demand.share([*inputs_of[node], end])
    demand.share_inputs_of_repeated_layers(inputs_of)
    placed = demand.insert(model, prefix)
    for node, decision in decisions.items():
        sources = inputs_of.get(node, [])
        decision.entry.input = _specs(sources, placed)
        node.meta["integer"] = decision.verdict is Verdict.INTEGER
        decision.entry.output = _specs([node], placed)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, QuantInputMixin) and sources:
            module.place_input_quantizer(placed[sources[0]])


class _Demand:
    """Collects which tensors must be quantized, for which users, and which of them as one."""

    def __init__(self, decisions: dict[fx.Node, Decision], by_hand: dict[fx.Node, TensorQuantizer]) -> None:
        self.decisions = decisions
        self.by_hand = by_hand
        self.recipes: dict[fx.Node, TensorRecipe] = {}
        self.users: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self.parent: dict[fx.Node, fx.Node] = {}

    def _walk(self, tensor: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Go from a tensor back over operators that only move values, to where the values come into being."""
        first_user = None
        while (decision := self.decisions.get(tensor)) is not None and decision.verdict is Verdict.CARRIED:
            before = tensor.args[0] if tensor.args else None
            if not isinstance(before, fx.Node) or before.meta.get("written"):
                break
            tensor, first_user = before, tensor
        return tensor, first_user

    def input(self, user: fx.Node, tensor: fx.Node, recipe: TensorRecipe) -> fx.Node:
        """Ask for the tensor that ``user`` reads; return where it will be quantized."""
        source, first_user = self._walk(tensor)
        if not is_float(source):
            source, first_user = tensor, None
        if source in self.by_hand:
            return source
        self.users[source].add(first_user or user)
        self._ask(source, recipe)
        return source

    def output(self, tensor: fx.Node, recipe: TensorRecipe) -> None:
        """Ask for a result, for all its users."""
        self.users[tensor].update(tensor.users)
        self._ask(tensor, recipe)

    def _ask(self, tensor: fx.Node, recipe: TensorRecipe) -> None:
        self.recipes.setdefault(tensor, recipe)
        self.parent.setdefault(tensor, tensor)

    def find(self, tensor: fx.Node) -> fx.Node:
        """The tensor whose quantizer serves ``tensor``."""
        while self.parent[tensor] is not tensor:
            tensor = self.parent[tensor]
        return tensor

    def share(self, tensors: list[fx.Node]) -> None:
        """Let several tensors have one quantizer."""
        roots = [self.find(t) for t in tensors if t in self.parent]
        for root in roots[1:]:
            self.parent[root] = roots[0]

    def share_inputs_of_repeated_layers(self, inputs_of: dict[fx.Node, list[fx.Node]]) -> None:
        """A layer called several times has one input quantizer, so that its bias has one scale."""
        calls: dict[object, list[fx.Node]] = defaultdict(list)
        for node, inputs in inputs_of.items():
            if node.op == "call_module":
                calls[node.target] += inputs
        for inputs in calls.values():
            self.share(inputs)

    def insert(self, model: CapturedModel, prefix: str) -> dict[fx.Node, TensorQuantizer]:
        """Put the quantizers into the graph; return the one of every quantized tensor."""
        order = {node: i for i, node in enumerate(model.graph.nodes)}
        placed: dict[fx.Node, TensorQuantizer] = dict(self.by_hand)
        names: dict[fx.Node, str] = {}
        for tensor in sorted(self.recipes, key=order.__getitem__):
            root = self.find(tensor)
            if root not in names:
                names[root] = f"{QUANTIZERS}.{tensor.name}"
                label = f"{prefix}.{node_name(tensor)}" if prefix else node_name(tensor)
                quantizer = build(self.recipes[root], _spec(self.recipes[root]), f"output of {label}")
                put_submodule(model, names[root], quantizer)
            quantizer = model.get_submodule(names[root])
            # Other users of a float operator keep reading the float tensor; an integer one has only integers.
            decision = self.decisions.get(tensor)
            keeps_float = decision is None or decision.keeps_float_result
            users = self.users[tensor] if keeps_float else set(tensor.users)
            with model.graph.inserting_after(tensor):
                call = model.graph.create_node("call_module", names[root], (tensor,), name=f"{tensor.name}_quantized")
            call.meta.update(tensor.meta)
            for user in users:
                user.replace_input_with(tensor, call)
            placed[tensor] = quantizer  # pyrefly: ignore
        return placed


def _placed_by_hand(model: CapturedModel, backend: Backend) -> dict[fx.Node, TensorQuantizer]:
    """The quantizers that the user has put into the forward, where the backend can go on from them."""
    found = {}
    for node in model.graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, TensorQuantizer):
            continue
        with contextlib.suppress(ConfigError):  # of another kind than the backend's: it gets one more after it
            backend.check_activation(module.spec, node.name)
            found[node] = module
    return found


def _result_quantized(decision: Decision, backend: Backend) -> bool:
    if decision.custom is not None:
        return bool(getattr(decision.custom, "integer", False))
    return backend.integer[decision.entry.operator]


def _end_of_group(node: fx.Node, decisions: dict[fx.Node, Decision]) -> fx.Node:
    """The last node computed together with ``node``: itself, or the activation fused with it."""
    users = list(node.users)
    if len(users) == 1 and (after := decisions.get(users[0])) is not None and after.verdict is Verdict.FUSED:
        return users[0]
    return node


def _specs(tensors: list[fx.Node], placed: dict[fx.Node, TensorQuantizer]) -> str:
    return ", ".join(dict.fromkeys(str(placed[t].spec) for t in tensors if t in placed))


def _spec(recipe: TensorRecipe):  # noqa: ANN202
    if recipe.spec is None:
        raise ValueError("a tensor recipe without a spec")
    return recipe.spec
