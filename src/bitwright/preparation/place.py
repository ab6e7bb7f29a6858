"""Place quantizers on edges: one per tensor, shared where the backend needs it, none where values only move.

A tensor is quantized where it comes into being, not where it is used: a max-pool or reshape between its
producer and an integer operator carries the producer's scale on. All calls of one layer share the quantizer
of its input.
"""

from torch import fx

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts, set_facts
from bitwright.nn.mixins import QuantInputMixin
from bitwright.preparation.decide import Decision, operands
from bitwright.preparation.demand import Demand, Edge, Key
from bitwright.preparation.ledger import Verdict
from bitwright.quantizer import TensorQuantizer


def place(model: CapturedModel, decisions: dict[fx.Node, Decision], backend: Backend, prefix: str) -> None:
    """Insert activation quantizers into the graph and tell the QModules about them."""
    demand = Demand(decisions, _placed_by_hand(model, backend))
    edges_of: dict[fx.Node, list[Edge]] = {}
    results: dict[fx.Node, list[Key]] = {}
    for node, decision in decisions.items():
        if not decision.quantizes or decision.own_quantizers:
            continue
        inputs, outputs = decision.places(backend)
        wanted = inputs or (decision.insists("input") and decision.wishes.input.floating)
        read = _read(node, decision, demand, backend) if wanted else []
        edges_of[node] = [demand.input(node, tensor, decision) for tensor in read]
        results[node] = _ask_result(node, decision, demand, outputs)
    demand.settle()
    inputs_of = {node: [e.key for e in edges if e.key is not None] for node, edges in edges_of.items()}
    for node, keys in inputs_of.items():
        if decisions[node].custom is None and decisions[node].entry.operator in backend.operators.share_inputs:
            demand.share([*keys, *results[node]])
    demand.share_inputs_of_repeated_layers()
    placed = demand.insert(model, prefix)
    for node, decision in decisions.items():
        sources = inputs_of.get(node) or _found(node, decision, demand)
        decision.entry.input = _specs(sources, placed)
        set_facts(node, integer=decision.verdict is Verdict.INTEGER)
        decision.entry.output = _specs(demand.first_request(node), placed)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, QuantInputMixin) and sources:
            module.place_input_quantizer(placed[sources[0]])


def _read(node: fx.Node, decision: Decision, demand: Demand, backend: Backend) -> list[fx.Node]:
    """The tensors an operator has quantized: what it reads, but for those the target computes along with it."""
    merged = backend.operators.merged.get(decision.entry.operator, frozenset())
    return [o for o in operands(node, decision.operator) if facts(demand.walk(o)[0]).operator not in merged]


def _ask_result(node: fx.Node, decision: Decision, demand: Demand, outputs: bool) -> list[Key]:
    end = _end_of_group(node, demand.decisions)
    last = demand.decisions[end]
    wish = last.wishes.output if last.insists("output") else decision.wishes.output
    asked = (outputs or last.asks_result) and not wish.floating
    return [demand.output(end, wish)] if asked else []


def _found(node: fx.Node, decision: Decision, demand: Demand) -> list[Key]:
    """The quantizers that an operator finds on its inputs without having asked."""
    if not decision.quantizes or decision.own_quantizers or decision.wishes.input.floating:
        return []
    return [key for o in operands(node, decision.operator) for key in demand.first_request(demand.walk(o)[0])]


def _placed_by_hand(model: CapturedModel, backend: Backend) -> dict[fx.Node, TensorQuantizer]:
    """The quantizers that the user has put into the forward, where the backend can go on from them."""
    found = {}
    for node in model.graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        # One of another kind than the backend's gets one more after it.
        if isinstance(module, TensorQuantizer) and backend.why_not("activations", module.spec) is None:
            found[node] = module
    return found


def _end_of_group(node: fx.Node, decisions: dict[fx.Node, Decision]) -> fx.Node:
    """The last node computed together with ``node``: itself, or the activation fused with it."""
    users = list(node.users)
    if len(users) == 1 and (after := decisions.get(users[0])) is not None and after.verdict is Verdict.FUSED:
        return users[0]
    return node


def _specs(keys: list[Key], placed: dict[Key, TensorQuantizer]) -> str:
    return ", ".join(dict.fromkeys(str(placed[k].spec) for k in keys if k in placed))
