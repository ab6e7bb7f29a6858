"""Swap QModules in: layers that will compute in integers get quantizers of their own and keep their names."""

import inspect
from typing import Any

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.graph import CapturedModel
from bitwright.graph.names import add_internal, put_submodule
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin, QuantMixin
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import adopt, is_custom, qmodule_for
from bitwright.preparation.build import build, needed_spec, no_quantizer, on_axis
from bitwright.preparation.decide import Decision
from bitwright.preparation.ledger import Entry, Verdict
from bitwright.preparation.wishes import Wishes
from bitwright.recipe import Recipe, TensorRecipe


def swap(model: CapturedModel, decisions: dict[fx.Node, Decision], recipe: Recipe, backend: Backend) -> None:
    """Replace layers whose weight is quantized by their QModules, and all that a user's QModule serves."""
    swapped: dict[str, nn.Module] = {}
    taken_over: dict[nn.Module | None, nn.Module] = {}
    for node, decision in decisions.items():
        weight = decision.wishes.weight
        has_weight = decision.operator is not None and decision.operator.weight and not weight.floating
        if not decision.quantizes or not (has_weight or decision.custom):
            continue
        if node.op == "call_module":
            name = str(node.target)
            if name in swapped:
                continue
            module = model.get_submodule(name)
            source: Any = type(module)
        else:
            name, module, source = "", None, node.target
        cls = qmodule_for(source)
        if cls is None:
            decision.entry.verdict, decision.entry.reason = (
                Verdict.FLOAT,
                "no quantized module is registered for it",
            )
            continue
        qmodule: Any = make(cls, node if module is None else module, decision.entry.name, recipe)
        if weight.floating and quantizes_weight(qmodule):
            decision.entry.verdict, decision.entry.reason = Verdict.PARTLY, "its weight stays float: it is not swapped"
            continue
        _give_weight_quantizer(qmodule, decision.entry.name, weight, backend)
        if isinstance(qmodule, QuantInputMixin) and "_input_quantizer" not in qmodule.__dict__:
            qmodule.place_input_quantizer(no_quantizer(backend.activations.spec))  # until one is placed
        if module is None:
            node.op, node.target = "call_module", add_internal(model, "functions", node.name, qmodule)
        else:
            put_submodule(model, name, qmodule)
            swapped[name] = taken_over[module] = qmodule
    for parent in model.modules():  # a layer may have several names
        parent._modules.update({n: taken_over[m] for n, m in parent._modules.items() if m in taken_over})
    for node, decision in decisions.items():
        if not decision.quantizes and node.op == "call_module" and str(node.target) in swapped:
            decision.entry.reason += ", but its weight is quantized, as another call of it has it"


def make(cls: type[Any], source: nn.Module | fx.Node, name: str, recipe: Recipe | None) -> Any:  # noqa: ANN401
    """Build a QModule of what it takes the place of: a module, or the call of a function or method."""
    if not is_custom(cls):
        return cls(source) if isinstance(source, fx.Node) else adopt(cls, source)
    try:
        if issubclass(cls, QuantOpr):
            options: dict[str, Any] = {"config": recipe} if "config" in inspect.signature(cls).parameters else {}
            made: Any = cls(source, **options)  # pyrefly: ignore
        elif isinstance(source, nn.Module):
            made = cls.from_float(source)
        else:
            raise TypeError("to take the place of a function it must derive from QuantOpr")
    except Exception as error:
        raise ConfigError(f"{name}: {cls.__qualname__} cannot be built: {type(error).__name__}: {error}") from error
    return made.train(source.training) if isinstance(source, nn.Module) else made


def quantizes_weight(module: nn.Module) -> bool:
    """Whether a QModule has a weight with a quantizer of its own."""
    return module.has_weight() if isinstance(module, QuantOpr) else isinstance(module, QuantMixin)


def give_quantizers(module: Any, name: str, wishes: Wishes, backend: Backend) -> None:  # noqa: ANN401
    """Give a QModule outside of any graph the quantizers of the recipe, its own."""
    if wishes.input.floating:
        module.place_input_quantizer(no_quantizer(backend.activations.spec))
    else:
        module._input_quantizer = build(wishes.input, needed_spec(wishes.input), f"input of {name}")
    _give_weight_quantizer(module, name, wishes.weight, backend)


def _give_weight_quantizer(module: Any, name: str, weight: TensorRecipe, backend: Backend) -> None:  # noqa: ANN401
    if quantizes_weight(module):
        spec = backend.check("weights", on_axis(weight, module.channel_axis), f"the weight of {name}")
        module._weight_quantizer = build(weight, spec, f"{name}.weight")
    if isinstance(module, QuantLayer) and not backend.integer_bias:
        module.quantize_bias = False


def note_quantizers(entry: Entry, module: nn.Module) -> None:
    """Write into the ledger that a module quantizes, and how."""
    entry.verdict, entry.reason = Verdict.INTEGER, ""
    specs = {kind: getattr(module, f"_{kind}_quantizer", None) for kind in ("input", "weight")}
    entry.input, entry.weight = ("" if q is None else str(q.spec) for q in specs.values())
