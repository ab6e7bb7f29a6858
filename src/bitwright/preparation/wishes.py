"""Wishes: what was asked for one operator, complete: the rule over the recipe over the backend."""

from dataclasses import dataclass

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.preparation.build import build
from bitwright.recipe import Recipe, Rule, TensorRecipe, with_bits
from bitwright.recipe.rule import Kind
from bitwright.spec import QuantSpec

# What bits alone mean where the backend has no specs of its own.
_NEUTRAL = {
    "weight": QuantSpec.parse("int8 symmetric channel:0"),
    "activation": QuantSpec.parse("uint8 affine tensor"),
}


@dataclass(frozen=True)
class Wishes:
    """How the tensors of one operator shall be quantized."""

    weight: TensorRecipe
    input: TensorRecipe
    output: TensorRecipe

    def problem(self, backend: Backend, has_weight: bool) -> str | None:
        """Why the backend cannot do that, or None if it can."""
        weights = [backend.why_not("weights", self.weight.quant_spec)] if has_weight else []
        activations = [backend.why_not("activations", recipe.quant_spec) for recipe in (self.input, self.output)]
        return next((problem for problem in (*weights, *activations) if problem), None)

    def asked(self, has_weight: bool) -> str:
        """The specs in one line."""
        kinds = [("weight", self.weight)] if has_weight else []
        kinds += [("input", self.input)] + ([("output", self.output)] if self.output.spec != self.input.spec else [])
        return ", ".join(f"{kind} {recipe.spec}" for kind, recipe in kinds)


def complete(rule: Rule | None, recipe: Recipe, backend: Backend, *, at_end: bool = False) -> Wishes:
    """All that is asked for an operator that ``rule`` speaks of, without gaps.

    Args:
        rule: the rule that won, if any.
        recipe: the user's recipe.
        backend: the target.
        at_end: whether it is a first or last layer, which some backends treat apart unless the rule has a spec for it.
    """
    return Wishes(*(_complete(kind, rule, recipe, backend, at_end) for kind in ("weight", "input", "output")))


def _complete(kind: Kind, rule: Rule | None, recipe: Recipe, backend: Backend, at_end: bool) -> TensorRecipe:
    is_weight = kind == "weight"
    asked = rule.asked(kind) if rule is not None else TensorRecipe()
    wish = asked.over(recipe.weight if is_weight else recipe.activation)
    if is_weight and wish.bits in backend.weights.used_bits:
        wish = wish.model_copy(update={"bits": backend.weights.used_bits[wish.bits]})
    whole = wish.over(_defaults(backend, is_weight))
    if whole.bits is not None:
        neutral = _NEUTRAL["weight" if is_weight else "activation"]
        whole = whole.model_copy(update={"spec": with_bits(neutral, whole.bits), "bits": None})
    spec = whole.quant_spec
    if spec is not None and spec.format.floating and wish.method is None:
        whole = whole.model_copy(update={"method": "FixedFakeQuantize", "method_options": {}})
    elif spec is not None and at_end and kind != "output" and asked.spec is None and not asked.bits:
        whole = whole.model_copy(update={"spec": with_bits(spec, backend.first_last_bits or spec.bits)})
    return whole


def _defaults(backend: Backend, is_weight: bool) -> TensorRecipe:
    rules = backend.weights if is_weight else backend.activations
    return TensorRecipe(spec=rules.spec, observer=rules.observer, method=rules.method)


def check(recipe: Recipe, backend: Backend) -> None:
    """Refuse what the backend could not run, and names that nothing answers to."""
    if missing := _left_open(recipe, backend):
        raise ConfigError(
            f"the backend {backend.name} leaves the specs to you: give {' and '.join(missing)} "
            "('int4 channel:0', 'uint4', or 'float'), or a preset such as 'W4A4'"
        )
    for rule in (None, *recipe.rules):
        where = f"the rule {rule.match!r}" if rule is not None else "the recipe"
        wishes = complete(rule, recipe, backend)
        for kind in ("weight", "input", "output"):
            wish: TensorRecipe = getattr(wishes, kind)
            spec = wish.quant_spec
            if spec is None or (rule is not None and rule.asked(kind).empty):
                continue
            problem = backend.why_not("weights" if kind == "weight" else "activations", spec)
            if problem and not recipe.allow_float:
                raise ConfigError(f"{where}: {problem}")
            build(wish, spec, "")


def _left_open(recipe: Recipe, backend: Backend) -> list[str]:
    kinds = {"weight": (backend.weights, recipe.weight), "activation": (backend.activations, recipe.activation)}
    return [k for k, (rules, wish) in kinds.items() if rules.spec is None and wish.spec is None and wish.bits is None]
