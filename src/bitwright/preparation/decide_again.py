"""Decide again after fusing: on the nodes that schedules have made, some of which become QModules, and those gone."""

from dataclasses import replace

from torch import fx

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts
from bitwright.graph.names import node_name
from bitwright.nn.mixins import QuantInputMixin
from bitwright.preparation.decide import Decision, decide
from bitwright.preparation.ledger import Verdict
from bitwright.preparation.rule_targets import Subjects
from bitwright.preparation.swap import swap
from bitwright.recipe import Recipe


def decide_again(
    model: CapturedModel,
    before: set[fx.Node],
    decisions: dict[fx.Node, Decision],
    recipe: Recipe,
    backend: Backend,
    subjects: Subjects,
    prefix: str,
) -> dict[fx.Node, Decision]:
    """The decisions of all nodes there are now, in the graph's order; what is gone is part of something else.

    Args:
        model: the graph after fusing.
        before: its nodes before.
        decisions: what was decided before; the entries of nodes that are gone are changed.
        recipe: the user's wishes.
        backend: what the target does.
        subjects: operators as rules see them.
        prefix: where the model is in the whole.
    """
    present = list(model.graph.nodes)
    made = [node for node in present if node not in before]
    inherited: dict[fx.Node, Decision] = {}
    for node in made:
        heir = _inherited(model, node, decisions)
        if heir is not None:
            name = f"{prefix}.{node_name(node)}" if prefix else node_name(node)
            inherited[node] = replace(heir, node=node, entry=replace(heir.entry, name=name))
    fresh = decide(model, prefix, recipe, backend, subjects, only=set(made) - inherited.keys())
    swap(model, {n: d for n, d in fresh.items() if not _is_quantized(model, n)}, recipe, backend)
    successors = {old: node_name(node) for node in made for old in facts(node).replaces}
    for node in decisions.keys() - set(present):
        entry, successor = decisions[node].entry, successors.get(node_name(node))
        entry.verdict = Verdict.FUSED
        entry.reason = f"replaced by {successor}" if successor else "folded into the layer before it"
    together = {**decisions, **inherited, **fresh}
    return {node: together[node] for node in present if node in together}


def _is_quantized(model: CapturedModel, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), QuantInputMixin)


def _inherited(model: CapturedModel, node: fx.Node, decisions: dict[fx.Node, Decision]) -> Decision | None:
    """The decision on a node that was replaced by another call of a QModule of the same class."""
    if node.op != "call_module":
        return None
    module = model.get_submodule(str(node.target))
    for old, decision in decisions.items():
        if old.op == "call_module" and node_name(old) in facts(node).replaces:
            before = model.get_submodule(str(old.target))
            if type(before) is type(module):
                return decision
    return None
