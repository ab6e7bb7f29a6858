"""QuanTransformer's config as a recipe: a quantized layer as specs, observers and methods, by class and by name."""

from collections.abc import Mapping
from typing import Any

from bitwright.compat.keys import translating
from bitwright.compat.quantrans.builder import QUANTRANSFORMERS
from bitwright.compat.quantrans.quantops.builder import QUANLAYERS
from bitwright.compat.quantrans.quantops.kinds import Plan
from bitwright.compat.quantrans.quantops.layer import QATLayer
from bitwright.compat.quantrans.special import SpecialLayers
from bitwright.methods import METHODS
from bitwright.recipe import Recipe, Rule, TensorRecipe
from bitwright.spec import QuantSpec

_BACKEND = "academic"  # its operators are convolutions and linear layers, as QuanTransformer's are
_END_BITS = 8  # of its first and last layers, where no rule says otherwise


def to_recipe(config: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of a ``quant_transformer`` dict, and notes on what has no equivalent in a recipe."""
    with translating("the config", config):
        return _translate(config)


def _translate(config: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    transformer: Any = QUANTRANSFORMERS.build(config)
    notes: list[str] = []
    rules = [_rule(f"type:{cls.__name__}", args, notes) for cls, args in transformer.register_dict.items()]
    special = [_rule(name, args, notes) for name, args in SpecialLayers.read(transformer.special_layers).items()]
    if _is_everything(rules):
        notes.append("what else academic quantizes (Conv1d, Conv3d and transposed convolutions) is quantized alike")
        shared = {"weight": rules[0].weight, "activation": rules[0].input}
        return Recipe(backend=_BACKEND, rules=tuple(special), **shared), notes  # pyrefly: ignore
    nothing = _tensor(None)
    return Recipe(backend=_BACKEND, weight=nothing, activation=nothing, rules=(*rules, *special)), notes


def _is_everything(rules: list[Rule]) -> bool:
    """Whether the rules say one thing of all operators, in as many bits as the first and last layers have anyway."""
    specs = [spec for rule in rules for spec in (rule.weight.quant_spec, rule.input.quant_spec)]
    alike = len({rule.model_copy(update={"match": ""}).model_dump_json() for rule in rules}) == 1
    eight = all(spec is not None and spec.bits == _END_BITS for spec in specs)
    return {rule.match for rule in rules} == {"type:Conv2d", "type:Linear"} and alike and eight


def _rule(match: str, args: Mapping[str, Any], notes: list[str]) -> Rule:
    cls = QUANLAYERS.class_of(args, f"{match}: ")
    if not issubclass(cls, QATLayer):
        notes.append(f"{match}: {cls.__name__} is your own code; the recipe leaves these layers float")
        return Rule(match=match, skip=True, optional=":" in match)
    options, _ = cls._split({key: value for key, value in args.items() if key != "type"})
    plans = cls.kind.plans(options)
    if plans[0].follow:
        notes.append(f"{match}: {cls.__name__} finds the range of the weight again in each training step")
    if not options.bSetQ or not any(options.quantized):
        return Rule(match=match, skip=True, optional=":" in match)
    weight, activation = (_tensor(p if on else None) for p, on in zip(plans, options.quantized, strict=True))
    return Rule(match=match, weight=weight, input=activation, optional=":" in match)


def _tensor(plan: Plan | None) -> TensorRecipe:
    if plan is None:
        return TensorRecipe(spec="float")  # pyrefly: ignore
    method = next(name for name in METHODS.names() if METHODS.get(name) is METHODS.get(plan.method))
    options = {"observer": plan.observer, "method": method, "method_options": plan.method_options}
    return TensorRecipe(spec=QuantSpec.parse(plan.spec), **options)  # pyrefly: ignore
