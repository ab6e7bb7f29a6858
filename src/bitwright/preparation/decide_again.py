"""Decide again after fusing: on nodes that schedules have made, some of which become QModules, and on those gone."""

from dataclasses import replace

from torch import fx

from bitwright.graph.build import module_of
from bitwright.graph.facts import facts
from bitwright.graph.names import node_name
from bitwright.preparation.decide import decide
from bitwright.preparation.region import Job, Region
from bitwright.preparation.swap import swap
from bitwright.preparation.verdicts import FOLDED, replaced_by


def decide_again(region: Region, before: list[fx.Node], job: Job) -> None:
    """Complete a region's table for the nodes that there are now; what is gone is part of something else.

    Args:
        region: the graph after fusing, with what was decided before.
        before: its nodes before.
        job: recipe and backend.
    """
    now, old = list(region.model.graph.nodes), set(before)
    made = [node for node in now if node not in old]
    fresh = [node for node in made if not _inherits(region, node, before)]
    decide(region, job, fresh)
    swap(region, job, fresh)
    successors = {name: node_name(node) for node in made for name in facts(node).replaces}
    for node in old.difference(now):
        if region.decisions.get(node) is not None:
            successor = successors.get(node_name(node))
            region.decisions.judge(node, replaced_by(successor) if successor else FOLDED)


def _inherits(region: Region, node: fx.Node, before: list[fx.Node]) -> bool:
    """Let a node have the decision on one that it replaces, if both call a QModule of the same class."""
    cls = type(module_of(node, region.model))
    for old in before if node.op == "call_module" else ():
        decision = region.decisions.get(old) if node_name(old) in facts(node).replaces else None
        if decision is not None and type(module_of(old, region.model)) is cls:
            region.decisions.record(node, replace(decision, name=region.named(node_name(node))))
            return True
    return False
