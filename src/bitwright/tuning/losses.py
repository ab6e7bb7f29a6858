"""Losses: which operators take longer in integers than in float, including conversions that only they need."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bitwright.exporting.formats.base import FileNode, LoadedFile
from bitwright.graph.names import qualified
from bitwright.preparation import Entry, Ledger, Verdict
from bitwright.recipe import Recipe, Rule
from bitwright.tuning.result import LeftFloat
from bitwright.verification.coverage import add_coverage
from bitwright.verification.latency import add_float_times
from bitwright.verification.proof import OperatorCheck, RuntimeProof
from bitwright.verification.runtimes.base import Executed, Runtime

_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


@dataclass
class Cost:
    """The time of the operators of one name, in microseconds."""

    quantized: float = 0.0
    plain: float = 0.0
    conversions: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    def add(self, operator: OperatorCheck) -> None:
        """Add an executed operator; one with an unknown float time neither gains nor loses."""
        known = operator.float_microseconds
        self.quantized += operator.microseconds
        self.plain += operator.microseconds if known is None else known

    def loses(self, times: float, least: float) -> bool:
        """Whether integers take longer than ``times`` the float operator and ``least`` microseconds more."""
        return self.quantized + self.conversions > times * self.plain + least


def costs_of(
    runtime: Runtime, file: LoadedFile, twin: LoadedFile, ledger: Ledger, feeds: Mapping[str, np.ndarray]
) -> dict[str, Cost]:
    """The cost of every operator that runs in integers and may be left float, by the user's name for it."""
    proof = RuntimeProof(runtime.name, runtime.version)
    executed = runtime.profile(file, feeds)
    add_coverage(proof, runtime, executed, file, ledger, feeds)
    add_float_times(proof, runtime, twin, feeds)
    choices = _choices(ledger)
    operators = file.record.operators if file.record is not None else ()
    owner = {o.node: o.name for o in operators if o.name in choices}
    found: dict[str, Cost] = {}
    for operator in proof.operators:
        name = next((owner[node] for node in operator.nodes if node in owner), None)
        if name is not None and operator.integer:
            found.setdefault(name, Cost(entries=choices[name])).add(operator)
    for name, microseconds in _conversions(executed, file.nodes(), owner, set(found)).items():
        found[name].conversions += microseconds
    return found


def losers(costs: Mapping[str, Cost], times: float, least: float) -> list[LeftFloat]:
    """The operators that lose, worst first, each with a rule that leaves it float."""
    chosen = [(name, cost) for name, cost in costs.items() if cost.loses(times, least)]
    chosen.sort(key=lambda each: each[1].plain - each[1].quantized - each[1].conversions)
    return [
        LeftFloat(name, cost.entries[0].operator, match, cost.quantized + cost.conversions, cost.plain)
        for name, cost in chosen
        for match in dict.fromkeys(_selector(entry) for entry in cost.entries)
    ]


def _choices(ledger: Ledger) -> dict[str, list[Entry]]:
    """The operators that may be left float: those in integers, except those that a rule of the user sets."""
    asked = {rule.match for rule in ledger.recipe.rules if rule.force or rule.asks}
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in ledger.entries:
        if entry.verdict in (Verdict.INTEGER, Verdict.PARTLY) and entry.rule not in asked:
            found[entry.name].append(entry)
    return dict(found)


def _selector(entry: Entry) -> str:
    return f"node:{qualified(entry.graph or '', entry.origin or entry.node)}" if entry.node else entry.name


def _conversions(
    executed: list[Executed], nodes: list[FileNode], owner: Mapping[str, str], integer: set[str]
) -> dict[str, float]:
    """The cost of conversions, charged in equal shares to the operators at their integer end."""
    neighbours = _Neighbours(nodes)
    charged: dict[str, float] = defaultdict(float)
    for event in executed:
        ends = neighbours.ends(event.nodes) if event.role == "conversion" else ()
        payers = {owner[n] for n in ends if n in owner} & integer
        for name in payers:
            charged[name] += event.microseconds / len(payers)
    return charged


class _Neighbours:
    """The nodes of a file before and after each."""

    def __init__(self, nodes: list[FileNode]) -> None:
        self.by_name = {node.name: node for node in nodes}
        self.makers = {tensor: node for node in nodes for tensor in node.outputs}
        self.readers: dict[str, list[FileNode]] = defaultdict(list)
        for node in nodes:
            for tensor in node.inputs:
                self.readers[tensor].append(node)

    def ends(self, names: Iterable[str]) -> Iterator[str]:
        """The operators at the integer end of conversions: they read what is quantized, or make what is dequantized."""
        for node in (self.by_name[n] for n in names if n in self.by_name):
            step = self._after if node.type == "QuantizeLinear" else self._before
            for near in step(node):
                yield from (n.name for n in (step(near) if near.type in _CONVERSIONS else [near]))

    def _after(self, node: FileNode) -> list[FileNode]:
        return [reader for tensor in node.outputs for reader in self.readers.get(tensor, ())]

    def _before(self, node: FileNode) -> list[FileNode]:
        maker = self.makers.get(node.inputs[0])
        return [] if maker is None else [maker]


def without(recipe: Recipe, left: list[LeftFloat]) -> Recipe:
    """The recipe with rules that leave operators float."""
    added = tuple(Rule(match=each.match, skip=True, optional=True) for each in left)
    return recipe.model_copy(update={"rules": (*recipe.rules, *added)})
