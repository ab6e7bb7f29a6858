"""Build quantizers as recipes say."""

from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import TensorRecipe
from bitwright.spec import PerChannel, QuantSpec


def make_quantizer(recipe: TensorRecipe, spec: QuantSpec, label: str) -> TensorQuantizer:
    """A quantizer by recipe."""
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
    """Stand for the quantizer of an input that stays float: off, and owned by no module, so nothing turns it on."""
    return TensorQuantizer(spec or QuantSpec())


def on_axis(recipe: TensorRecipe, axis: int) -> QuantSpec:
    """The spec of a weight whose output channels lie on ``axis``."""
    spec = needed_spec(recipe)
    return spec.with_(granularity=PerChannel(axis)) if isinstance(spec.granularity, PerChannel) else spec


def needed_spec(recipe: TensorRecipe) -> QuantSpec:
    """The spec of a tensor that is quantized."""
    if recipe.quant_spec is None:
        raise ValueError("a tensor recipe without a spec")
    return recipe.quant_spec
