"""Recipes: what the user wants as a validated value, from Python, a dict, YAML or JSON, and back."""

from bitwright.recipe.core import Recipe
from bitwright.recipe.presets import PRESETS, Preset
from bitwright.recipe.rule import Rule, RuleTarget
from bitwright.recipe.tensor import FLOAT, TensorRecipe, with_bits

__all__ = ["FLOAT", "PRESETS", "Preset", "Recipe", "Rule", "RuleTarget", "TensorRecipe", "with_bits"]
