"""Region and Job: the graphs that one call of prepare works on, with their decisions, and the recipe and backend."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.graph.names import qualified
from bitwright.preparation.decisions import Decisions
from bitwright.preparation.operator_recipe import OperatorRecipe, no_quantizer, operator_recipe
from bitwright.preparation.rule_targets import RuleTargets
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, Rule


@dataclass(frozen=True)
class Region:
    """One graph, its path in the whole model, and the decisions on it."""

    path: str
    model: CapturedModel
    decisions: Decisions = field(default_factory=Decisions)

    def named(self, name: str) -> str:
        """The user's name for something in this graph, seen from the whole model."""
        return qualified(self.path, name)

    def finish(self) -> None:
        """Write the graph's code, and keep the decisions with it."""
        self.model.graph.lint()
        self.model.recompile()
        self.decisions.keep_with(self.model)


@dataclass(frozen=True)
class Job:
    """What decides how operators compute."""

    recipe: Recipe
    backend: Backend
    targets: RuleTargets
    islands: Collection[str] = ()
    _recipes: dict[tuple[int, bool, str], OperatorRecipe] = field(default_factory=dict)

    @cached_property
    def no_input_quantizer(self) -> TensorQuantizer:
        """What all layers hold until a quantizer is placed before them, and keep if their input stays float."""
        return no_quantizer(self.backend.activations.spec)

    def rule_for(self, node: fx.Node, path: str, operator: str) -> Rule | None:
        """The rule that wins for a call in the graph that stands at ``path``."""
        return self.recipe.rule_for(self.targets.of_node(node, path, operator)) if self.recipe.rules else None

    def recipe_for(self, rule: Rule | None, *, first_or_last: bool = False, operator: str = "") -> OperatorRecipe:
        """The settings for operators of a kind that a given rule, or none, matches."""
        kind = operator if operator in self.backend.operators.inputs else ""
        key = (id(rule), first_or_last, kind)
        if key not in self._recipes:
            own = operator_recipe(rule, self.recipe, self.backend, first_or_last=first_or_last, operator=kind)
            self._recipes[key] = own
        return self._recipes[key]
