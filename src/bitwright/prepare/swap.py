"""Swap QModules in: layers that will compute in integers get quantizers of their own and keep their names."""

from typing import Any

from torch import fx, nn

from bitwright.backends import Backend
from bitwright.graph import CapturedModel
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.registry import QMODULES, adopt
from bitwright.prepare.decide import Decision, tensor_recipes
from bitwright.prepare.ledger import Verdict
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe, TensorRecipe
from bitwright.spec import PerChannel, QuantSpec

FUNCTIONS = "quantized_functions"


def swap(model: CapturedModel, decisions: dict[fx.Node, Decision], recipe: Recipe, backend: Backend) -> None:
    """Replace every layer with a weight that was judged integer by its QModule."""
    swapped: dict[str, nn.Module] = {}
    taken_over: dict[nn.Module | None, nn.Module] = {}
    for node, decision in decisions.items():
        if decision.verdict is not Verdict.INTEGER or decision.operator is None or not decision.operator.weight:
            continue
        weight, _ = tensor_recipes(decision, recipe, backend)
        where = f"the weight of {decision.entry.name}"
        if node.op == "call_module":
            name = str(node.target)
            if name in swapped:
                continue
            module = model.get_submodule(name)
            source: Any = type(module)
        else:
            name, module, source = f"{FUNCTIONS}.{node.name}", None, node.target
        cls = QMODULES.get(source)
        if cls is None:
            decision.entry.verdict, decision.entry.reason = (
                Verdict.FLOAT,
                "no quantized module is registered for it",
            )
            continue
        qmodule: Any = cls(node) if module is None else adopt(cls, module)
        spec = on_axis(weight, qmodule.channel_axis)
        backend.check_weight(spec, where)
        add_quantizers(qmodule, build(weight, spec, f"{decision.entry.name}.weight"), None)
        put_submodule(model, name, qmodule)
        if module is None:
            node.op, node.target = "call_module", name
        else:
            taken_over[module] = qmodule
        swapped[name] = qmodule
    for parent in model.modules():  # a layer may have several names
        parent._modules.update({n: taken_over[m] for n, m in parent._modules.items() if m in taken_over})


def on_axis(recipe: TensorRecipe, axis: int) -> QuantSpec:
    """The spec of a weight, its channel axis being where the operator has its output channels."""
    spec = recipe.spec
    if spec is None:
        raise ValueError("a tensor recipe without a spec")
    return spec.with_(granularity=PerChannel(axis)) if isinstance(spec.granularity, PerChannel) else spec


def build(recipe: TensorRecipe, spec: QuantSpec, label: str) -> TensorQuantizer:
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


def add_quantizers(module: QuantMixin, weight: TensorQuantizer, input: TensorQuantizer | None) -> None:
    """Give a QModule its quantizers."""
    module._weight_quantizer = weight
    if input is not None:
        module._input_quantizer = input


def put_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name, making containers on the way where there are none."""
    *path, last = name.split(".")
    parent = model
    for part in path:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent._modules[last] = module
