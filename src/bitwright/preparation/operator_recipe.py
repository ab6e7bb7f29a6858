"""OperatorRecipe: the settings for one operator (rule over recipe over backend), and its quantizers."""

from dataclasses import dataclass, field

from bitwright.backends import Backend
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, Rule, TensorRecipe, with_bits
from bitwright.recipe.rule import Kind
from bitwright.spec import PerChannel, QuantSpec

# What bits alone mean if the backend has no specs.
_NEUTRAL = {
    "weight": QuantSpec.parse("int8 symmetric channel:0"),
    "input": QuantSpec.parse("uint8 affine tensor"),
    "output": QuantSpec.parse("uint8 affine tensor"),
}


@dataclass(frozen=True)
class OperatorRecipe:
    """How to quantize the tensors of one operator."""

    weight: TensorRecipe = field(default_factory=TensorRecipe)
    input: TensorRecipe = field(default_factory=TensorRecipe)
    output: TensorRecipe = field(default_factory=TensorRecipe)

    def problem(self, backend: Backend, has_weight: bool) -> str | None:
        """Why the backend cannot do that, or None if it can."""
        weights = [backend.why_not("weights", self.weight.quant_spec)] if has_weight else []
        activations = [backend.why_not("activations", recipe.quant_spec) for recipe in (self.input, self.output)]
        return next((problem for problem in (*weights, *activations) if problem), None)

    def text(self, has_weight: bool) -> str:
        kinds = [("weight", self.weight)] if has_weight else []
        kinds += [("input", self.input)] + ([("output", self.output)] if self.output.spec != self.input.spec else [])
        return ", ".join(f"{kind} {recipe.spec}" for kind, recipe in kinds)


def operator_recipe(
    rule: Rule | None, recipe: Recipe, backend: Backend, *, first_or_last: bool = False, operator: str = ""
) -> OperatorRecipe:
    """All settings for an operator; backends may give first and last layers more bits, unless their rule has a spec.

    Backends may also give some operators other inputs, with the same exception.
    """
    own = backend.operators.inputs.get(operator)
    general: dict[Kind, TensorRecipe] = {
        "weight": recipe.weight,
        "input": recipe.activation,
        "output": recipe.activation,
    }
    tensors = []
    for kind, below in general.items():
        by_rule = rule.asked(kind) if rule is not None else TensorRecipe()
        asked = by_rule.over(below)
        if kind == "weight" and asked.bits in backend.weights.used_bits:
            asked = asked.model_copy(update={"bits": backend.weights.used_bits[asked.bits]})
        if kind == "input" and own is not None and not asked.floating and by_rule.spec is None and by_rule.bits is None:
            asked = asked.model_copy(update={"spec": own, "bits": None, "nonnegative": "unsigned"})
        whole = _complete(asked, kind, backend)
        if first_or_last and kind != "output" and by_rule.spec is None and by_rule.bits is None:
            whole = _in_bits(whole, backend.first_last_bits)
        tensors.append(whole)
    return OperatorRecipe(*tensors)


def _complete(asked: TensorRecipe, kind: Kind, backend: Backend) -> TensorRecipe:
    """The settings for a tensor, completed with the backend's."""
    rules = backend.weights if kind == "weight" else backend.activations
    whole = asked.over(TensorRecipe(spec=rules.spec, observer=rules.observer, method=rules.method))
    if whole.bits is not None:
        neutral = _NEUTRAL[kind]
        whole = whole.model_copy(update={"spec": with_bits(neutral, whole.bits), "bits": None})
    if whole.quant_spec is not None and whole.quant_spec.format.floating and asked.method is None:
        return whole.model_copy(update={"method": "FixedFakeQuantize", "method_options": {}})
    return whole


def _in_bits(recipe: TensorRecipe, bits: int | None) -> TensorRecipe:
    """A recipe for first and last layers, with their number of bits; floating-point formats stay."""
    spec = recipe.quant_spec
    if spec is None or spec.format.floating or bits is None:
        return recipe
    method = recipe.first_last_method
    other = {} if method is None else {"method": method, "method_options": {}}
    return recipe.model_copy(update={"spec": with_bits(spec, bits), **other})


def make_quantizer(recipe: TensorRecipe, spec: QuantSpec, label: str) -> TensorQuantizer:
    """Build a quantizer from a recipe."""
    quantizer = TensorQuantizer(
        spec,
        recipe.observer or "MinMaxObserver",
        recipe.method or "FixedFakeQuantize",
        observer_options=recipe.observer_options,
        method_options=recipe.method_options,
    )
    quantizer.label = label
    return quantizer


def no_quantizer(spec: QuantSpec | None = None) -> TensorQuantizer:
    """Return a stand-in for the quantizer of a float input: off, and owned by no module, so nothing turns it on."""
    return TensorQuantizer(spec or QuantSpec())


def on_axis(recipe: TensorRecipe, axis: int) -> QuantSpec:
    """The spec of a weight whose output channels are on ``axis``."""
    spec = needed_spec(recipe)
    other = isinstance(spec.granularity, PerChannel) and spec.granularity.axis != axis
    return spec.with_(granularity=PerChannel(axis)) if other else spec


def needed_spec(recipe: TensorRecipe) -> QuantSpec:
    """The spec of a tensor that is quantized."""
    if recipe.quant_spec is None:
        raise ValueError("a tensor recipe without a spec")
    return recipe.quant_spec
