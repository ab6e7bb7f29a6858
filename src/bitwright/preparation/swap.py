"""Swap in QModules: layers that will compute in integers get their own quantizers and keep their names."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.graph import Capture
from bitwright.graph.names import add_internal, module_of, put_submodule, replace_modules
from bitwright.nn.dynamic_recurrent import DynamicLSTM
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin, QuantMixin
from bitwright.nn.operators import operator_of_module
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import adopt, is_custom, qmodule_for
from bitwright.preparation.decisions import Decision, Decisions, Judgement
from bitwright.preparation.operator_recipe import OperatorRecipe, make_quantizer, needed_spec, no_quantizer, on_axis
from bitwright.preparation.region import Job, Region
from bitwright.preparation.rule_targets import module_kind
from bitwright.preparation.verdicts import DYNAMIC, NO_QMODULE, NOT_SWAPPED, judge_loose, shares_weight
from bitwright.recipe import Recipe, TensorRecipe


def swap(region: Region, job: Job, nodes: Collection[fx.Node]) -> None:
    """Replace layers with a quantized weight by their QModules, and everything that a user's QModule serves."""
    swapped: dict[nn.Module, nn.Module] = {}
    for node in nodes:
        decision, module = region.decisions.get(node), module_of(node, region.model)
        if decision is None or module in swapped or not _needs_qmodule(decision, module):
            continue
        made = _qmodule(node, module, decision, job)
        if isinstance(made, Judgement):
            region.decisions.judge(node, made)
        elif module is not None:
            swapped[module] = made
        else:
            node.op, node.target = "call_module", add_internal(region.model, "functions", node.name, made)
    _note_shared_weights(region, nodes, swapped)
    replace_modules(region.model, swapped)


def _note_shared_weights(region: Region, nodes: Collection[fx.Node], swapped: Mapping[nn.Module, nn.Module]) -> None:
    """Note on float calls that the weight is quantized if another call of the layer needs that."""
    for node in nodes:
        decision = region.decisions.get(node)
        if decision is not None and not decision.quantizes and module_of(node, region.model) in swapped:
            region.decisions.judge(node, shares_weight(decision.judgement))


def _needs_qmodule(decision: Decision, module: nn.Module | None) -> bool:
    if isinstance(module, QuantInputMixin):
        return False
    has_weight = decision.operator is not None and decision.operator.weight and not decision.recipe.weight.floating
    return decision.quantizes and (has_weight or decision.custom is not None or decision.judgement is DYNAMIC)


def _qmodule(node: fx.Node, module: nn.Module | None, decision: Decision, job: Job) -> Judgement | nn.Module:
    """The QModule that replaces a call, with its weight quantizer, or the verdict if there is none."""
    if isinstance(module, nn.LSTM):
        return _dynamic_lstm(module, decision)
    cls = qmodule_for(node.target if module is None else type(module))
    if cls is None:
        return NO_QMODULE
    made: Any = make(cls, node if module is None else module, decision.name, job.recipe)
    if decision.recipe.weight.floating and quantizes_weight(made):
        return NOT_SWAPPED
    _give_weight_quantizer(made, decision.name, decision.recipe.weight, job.backend)
    if isinstance(made, QuantInputMixin) and "_input_quantizer" not in made.__dict__:
        made.place_input_quantizer(job.no_input_quantizer)
    return made


def _dynamic_lstm(module: nn.LSTM, decision: Decision) -> nn.Module:
    weight = decision.recipe.weight
    return DynamicLSTM.of(module, decision.name, lambda name: make_quantizer(weight, on_axis(weight, 0), name))


def make(cls: type[Any], source: nn.Module | fx.Node, name: str, recipe: Recipe | None) -> Any:  # noqa: ANN401
    """Build a QModule from what it replaces: a module, or the call of a function or method."""
    if not is_custom(cls):
        return cls(source) if isinstance(source, fx.Node) else adopt(cls, source)
    try:
        if issubclass(cls, QuantOpr):
            options: dict[str, Any] = {"config": recipe} if "config" in inspect.signature(cls).parameters else {}
            made: Any = cls(source, **options)  # pyrefly: ignore
        elif isinstance(source, nn.Module):
            made = cls.from_float(source)
        else:
            raise TypeError("to replace a function it must derive from QuantOpr")
    except Exception as error:
        raise ConfigError(f"{name}: {cls.__qualname__} cannot be built: {type(error).__name__}: {error}") from error
    return made.train(source.training) if isinstance(source, nn.Module) else made


def own_operator(cls: type[Any] | None) -> type[Any] | None:
    """The class if it is a user's own QModule, and not one of Bitwright's layers."""
    return cls if cls is not None and is_custom(cls) and not issubclass(cls, QuantLayer) else None


def quantizes_weight(module: nn.Module) -> bool:
    """Whether a QModule has a weight with its own quantizer."""
    return module.has_weight() if isinstance(module, QuantOpr) else isinstance(module, QuantMixin)


def give_quantizers(module: Any, name: str, recipe: OperatorRecipe, backend: Backend) -> None:  # noqa: ANN401
    """Give a QModule outside any graph its own quantizers, by the recipe."""
    if recipe.input.floating:
        module.place_input_quantizer(no_quantizer(backend.activations.spec))
    else:
        module._input_quantizer = make_quantizer(recipe.input, needed_spec(recipe.input), f"input of {name}")
    _give_weight_quantizer(module, name, recipe.weight, backend)


def _give_weight_quantizer(module: Any, name: str, weight: TensorRecipe, backend: Backend) -> None:  # noqa: ANN401
    if quantizes_weight(module):
        spec = backend.check("weights", on_axis(weight, module.channel_axis), f"the weight of {name}")
        module._weight_quantizer = make_quantizer(weight, spec, f"{name}.weight")
    if isinstance(module, QuantLayer):
        module.quantize_bias = backend.integer_bias and module.scale_per_output


def swap_loose(captured: Capture, job: Job) -> Decisions:
    """Swap the layers that no graph calls; return the decisions by layer name."""
    decisions = Decisions()
    for path in captured.loose:
        module = captured.model.get_submodule(path)
        rule = job.recipe.rule_for(job.targets.of_module(path, module))
        cls = qmodule_for(type(module))
        known = module_kind(module), operator_of_module(module), job.recipe_for(rule), rule, own_operator(cls)
        drafted = Decision(path, *known)
        decision = drafted._replace(judgement=judge_loose(drafted, cls, job))
        if decision.quantizes:
            made = make(cls, module, path, job.recipe)  # pyrefly: ignore  (it does not quantize without a class)
            give_quantizers(made, path, decision.recipe, job.backend)
            put_submodule(captured.model, path, made)
            decision = with_own_quantizers(decision, path, made)
        decisions.record(path, decision)
    return decisions


def with_own_quantizers(decision: Decision, path: str, module: nn.Module) -> Decision:
    """The decision on a layer that owns its quantizers, with their names."""
    own, weight = (
        f"{path}.{name}".lstrip(".") if module._modules.get(name) is not None else ""
        for name in ("_input_quantizer", "_weight_quantizer")
    )
    return decision._replace(inputs=(own,) if own else (), weight=weight)
