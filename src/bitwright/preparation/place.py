"""Place quantizers on edges: one per tensor, shared where the backend needs it, none where values only move.

A tensor is quantized where it is produced, not where it is used: a max-pool or reshape between its producer and an
integer operator passes on the producer's scale. Each call of a layer has its own input quantizer; the weight and its
quantizer are shared.
"""

from collections import defaultdict
from collections.abc import Collection

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph.names import module_of
from bitwright.graph.walks import first_input
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin
from bitwright.preparation.decisions import Decision, Decisions, Verdict
from bitwright.preparation.demand import Demand, Edge, Key, tells_calls_apart
from bitwright.preparation.float_tensors import operands
from bitwright.preparation.operator_recipe import no_quantizer
from bitwright.preparation.region import Region
from bitwright.quantizer import TensorQuantizer


def place(region: Region, backend: Backend) -> None:
    """Insert activation quantizers into the graph, tell the QModules about them, and record who got which."""
    decisions = region.decisions
    demand = Demand(decisions, _placed_by_hand(region, backend), backend)
    edges: dict[fx.Node, list[Edge]] = {}
    results: dict[fx.Node, list[Key]] = {}
    for node, decision in decisions.within(region.model.graph):
        if decision.quantizes and not decision.brings_quantizers:
            edges[node] = [demand.input(node, tensor, decision) for tensor in _read(node, decision, demand, backend)]
            results[node] = _ask_result(node, decision, demand, backend)
    demand.settle()
    for node in edges:
        if decisions[node].custom is None and decisions[node].kind in backend.operators.share_inputs:
            demand.share([*_keys(edges[node]), *results[node]])
    demand.share_inputs_of_repeated_modules(region)
    names = demand.insert(region)
    for node, decision in decisions.within(region.model.graph):
        sources = _keys(edges.get(node, [])) or _found(node, decision, demand)
        _record(region, node, decision, sources, demand, names)
    _number_calls(region, backend)


def _keys(edges: list[Edge]) -> list[Key]:
    return [edge.key for edge in edges if edge.key is not None]


def _record(
    region: Region, node: fx.Node, decision: Decision, sources: list[Key], demand: Demand, names: dict[Key, str]
) -> None:
    """Record an operator's quantizers in the table, and tell its QModule about that of its input."""
    module = module_of(node, region.model)
    inputs = tuple(names[key] for key in sources if key in names)
    outputs = tuple(names[key] for key in demand.first_request(node) if key in names)
    weight = _weight_quantizer(node, module) if decision.quantizes else ""
    if any((inputs, weight, outputs)):
        region.decisions.record(node, decision._replace(inputs=inputs, weight=weight, outputs=outputs))
    if isinstance(module, QuantInputMixin) and inputs:
        module.place_input_quantizer(region.model.get_submodule(inputs[0]))  # pyrefly: ignore


def _weight_quantizer(node: fx.Node, module: nn.Module | None) -> str:
    """The name of the quantizer of a module's weight, the first if there are several, or empty."""
    for key in ("_weight_quantizer", "_weight_quantizers"):
        own = getattr(module, "_modules", {}).get(key)
        if own is not None:
            return f"{node.target}.{key}.0" if isinstance(own, nn.ModuleList) else f"{node.target}.{key}"
    return ""


def _number_calls(region: Region, backend: Backend) -> None:
    """Tell each layer that is called several times which quantizer runs before each call."""
    calls: dict[nn.Module, list[fx.Node]] = defaultdict(list)
    for node in region.model.graph.nodes:
        if tells_calls_apart(node, region):
            calls[region.model.get_submodule(str(node.target))].append(node)
    for layer, nodes in calls.items():
        if len(nodes) > 1 and isinstance(layer, QuantLayer):
            none = no_quantizer(backend.activations.spec)
            layer.place_calls([_before(region, node) or none for node in nodes])
            for number, node in enumerate(nodes[1:], 1):
                node.kwargs = {**node.kwargs, "call": number}


def _before(region: Region, node: fx.Node) -> TensorQuantizer | None:
    """The quantizer of a call's first input."""
    decision = region.decisions.get(node)
    names = () if decision is None else decision.inputs
    return region.model.get_submodule(names[0]) if names else None  # pyrefly: ignore


def _read(node: fx.Node, decision: Decision, demand: Demand, backend: Backend) -> list[fx.Node]:
    """The tensors that an operator needs quantized: its inputs, except those that the target computes along with it."""
    if not decision.places(backend)[0] and not (decision.insists("input") and decision.recipe.input.floating):
        return []
    merged = backend.operators.merged.get(decision.kind, frozenset())
    found = operands(node, decision.operator)
    found = [o for o in found if (d := demand.decisions.get(demand.walk(o)[0])) is None or d.kind not in merged]
    return _without_absorbed(found, decision, demand.decisions, backend)


def _without_absorbed(
    found: list[fx.Node], decision: Decision, decisions: Decisions, backend: Backend
) -> list[fx.Node]:
    """All but the first tensor whose layer also computes the operator."""
    absorbing = backend.operators.absorbed.get(decision.kind, frozenset())
    taken = next((o for o in found if _takes_in(o, absorbing, decisions, backend)), None)
    return [o for o in found if o is not taken]


def _takes_in(tensor: fx.Node, kinds: Collection[str], decisions: Decisions, backend: Backend) -> bool:
    """Whether the layer that produces a tensor, with the norm after it, also computes the tensor's only reader."""
    while (decision := decisions.get(tensor)) is not None and len(tensor.users) == 1:
        folded = decision.verdict is Verdict.FUSED and decision.kind not in backend.operators.fused
        folded |= decision.kind == "batch_norm"
        if not folded or (before := first_input(tensor)) is None:
            return decision.kind in kinds
        tensor = before
    return False


def _ask_result(node: fx.Node, decision: Decision, demand: Demand, backend: Backend) -> list[Key]:
    end = _end_of_group(node, demand.decisions)
    last = demand.decisions[end]
    recipe = last.recipe.output if last.insists("output") else decision.recipe.output
    asked = (decision.places(backend)[1] or last.asks_result) and not recipe.floating
    return [demand.output(end, recipe)] if asked else []


def _found(node: fx.Node, decision: Decision, demand: Demand) -> list[Key]:
    """The quantizers that an operator finds on its inputs without requesting them."""
    if not decision.quantizes or decision.brings_quantizers or decision.recipe.input.floating:
        return []
    return [key for o in operands(node, decision.operator) for key in demand.first_request(demand.walk(o)[0])]


def _placed_by_hand(region: Region, backend: Backend) -> set[fx.Node]:
    """The quantizers that the user put into the forward, where the backend can continue from them."""
    found = set()
    for node in region.model.graph.nodes:
        module = module_of(node, region.model)
        # One that differs from the backend's gets another after it.
        if isinstance(module, TensorQuantizer) and backend.why_not("activations", module.spec) is None:
            found.add(node)
    return found


def _end_of_group(node: fx.Node, decisions: Decisions) -> fx.Node:
    """The last node computed together with ``node``: itself, or the last of what is fused with it."""
    while len(node.users) == 1 and (after := decisions.get(user := next(iter(node.users)))) is not None:
        if after.verdict is not Verdict.FUSED:
            break
        node = user
    return node
