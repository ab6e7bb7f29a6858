"""swap_modules: replace a model's layers by QModules, without a graph, for models that cannot be traced."""

import copy
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from bitwright.backends import Backend, find_backend
from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.graph import Inputs
from bitwright.graph.names import replace_modules
from bitwright.nn.mixins import QuantInputMixin, QuantMixin
from bitwright.nn.operators import operator_of_module
from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.preparation.decisions import Decision, Decisions, Judgement, Verdict
from bitwright.preparation.ledger import Ledger, attach, entries_of, is_prepared
from bitwright.preparation.operator_recipe import operator_recipe
from bitwright.preparation.resolve import check_recipe
from bitwright.preparation.rule_targets import module_kind
from bitwright.preparation.swap import give_quantizers, make, with_own_quantizers
from bitwright.preparation.verdicts import OWN_QUANTIZERS
from bitwright.quantizer import QuantDescriptor, TensorQuantizer, quantizers
from bitwright.recipe import Recipe

_DEFAULT_BACKEND = "onnxruntime"


@torch.inference_mode(False)  # the quantizers outlive it, and may be trained
def swap_modules(
    model: nn.Module,
    *,
    backend: str | Backend | None = None,
    quant_desc_input: QuantDescriptor | None = None,
    quant_desc_weight: QuantDescriptor | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    example_inputs: Any = None,  # noqa: ANN401
    inplace: bool = False,
) -> nn.Module:
    """Replace a model's layers by QModules, each with its own quantizers.

    Args:
        model: the float model. Its forward is not analyzed, so functions that it calls stay as they are.
        backend: quantize what this target runs in integers, as it does. Without one, descriptors say how, and
            convolutions, linear, recurrent and attention layers and average pools are swapped, and so are your own
            QModules.
        quant_desc_input: how inputs are quantized; by default as each QModule's class says.
        quant_desc_weight: the same for weights.
        include: names or globs of the layers to swap, whatever their kind; a name includes everything inside it.
        exclude: names or globs of layers to leave alone.
        example_inputs: inputs for ``export`` and ``verify``.
        inplace: change ``model`` itself instead of a copy.

    Returns:
        The model, all its quantizers off: it computes what it did before.
    """
    descriptors = {"quant_desc_input": quant_desc_input, "quant_desc_weight": quant_desc_weight}
    if backend is not None and any(descriptors.values()):
        raise ConfigError("give a backend or descriptors, not both: the backend says how tensors are quantized")
    if is_prepared(model):
        raise ConfigError("this model is prepared already; swap the modules of the float model it was made from")
    target = find_backend(backend or _DEFAULT_BACKEND)
    check_recipe(Recipe(backend=target.name), target)
    included, excluded = _patterns(include, model), _patterns(exclude, model) or []
    whole = model if inplace else copy.deepcopy(model)
    ledger = Ledger(target, Recipe(backend=target.name), Inputs.of(() if example_inputs is None else example_inputs))
    kept = {"include": included, "exclude": excluded, "example_inputs": example_inputs}
    ledger.arguments = {**descriptors, "backend": backend is not None, **kept}
    ledger.swapped = True
    asked = None if backend is None else target
    whole, decisions = _swapped(whole, asked, included, excluded, descriptors)
    ledger.entries = entries_of(decisions, whole, target)
    attach(whole, ledger)
    return whole


def _swapped(
    model: nn.Module,
    backend: Backend | None,
    included: list[str] | None,
    excluded: list[str],
    descriptors: Mapping[str, QuantDescriptor | None],
) -> tuple[nn.Module, Decisions]:
    decisions = Decisions()
    swapped: dict[nn.Module, nn.Module] = {}
    for name, module in _outermost(model):
        if isinstance(module, QuantInputMixin):
            decisions.record(name, Decision(name, module_kind(module), judgement=OWN_QUANTIZERS))
        elif _wanted(name, module, included, backend) and not _matches(excluded, name):
            made = swapped[module] = _made(module, name, backend, descriptors)
            decision = Decision(name, module_kind(module), judgement=Judgement(Verdict.INTEGER))
            decisions.record(name, with_own_quantizers(decision, name, made))
    return swap_in(model, swapped), decisions


def _patterns(given: str | Iterable[str] | None, model: nn.Module) -> list[str] | None:
    if given is None:
        return None
    names = [name for name, module in model.named_modules() if not isinstance(module, TensorQuantizer)]
    patterns = [given] if isinstance(given, str) else list(given)
    for pattern in patterns:
        if not any(_matches([pattern], name) for name in names):
            raise UnknownNameError(f"no module is named {pattern!r}{suggest(pattern, [n for n in names if n])}")
    return patterns


def _matches(patterns: list[str], name: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def _outermost(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, except those inside one that has a QModule, which computes for them."""
    found: list[tuple[str, nn.Module]] = []
    inside = None
    for name, module in model.named_modules():
        if inside is not None and (name.startswith(f"{inside}.") or inside == ""):
            continue
        inside = None
        found.append((name, module))
        if qmodule_for(type(module)) is not None or isinstance(module, QuantInputMixin):
            inside = name
    return found


def _wanted(name: str, module: nn.Module, included: list[str] | None, backend: Backend | None) -> bool:
    cls = qmodule_for(type(module))
    if cls is None:
        return False
    if included is not None:
        return _matches(included, name)
    if is_custom(cls):
        return True
    operator = operator_of_module(module)
    if backend is not None:
        return operator is not None and operator.name in backend.operators.integer
    return getattr(cls, "by_default", True)


def _made(
    module: nn.Module, name: str, backend: Backend | None, descriptors: Mapping[str, QuantDescriptor | None]
) -> nn.Module:
    cls: Any = qmodule_for(type(module))
    if backend is not None:
        made = make(cls, module, name, None)
        give_quantizers(made, name, operator_recipe(None, Recipe(backend=backend.name), backend), backend)
    elif issubclass(cls, QuantOpr):
        made = make(cls, module, name, None)
        made.init_quantizers(**descriptors)
    else:
        kinds = ["quant_desc_input", "quant_desc_weight"] if issubclass(cls, QuantMixin) else ["quant_desc_input"]
        made = cls.from_float(module, **{k: descriptors[k] for k in kinds})
    for path, quantizer in quantizers(made).items():
        quantizer.label = quantizer.label or f"{name}.{path}"
        quantizer.off()
    return made


def swap_in(model: nn.Module, swapped: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules by others, under all their names; return the model, which may be one of them."""
    replace_modules(model, swapped)
    made = set(swapped.values())
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoderLayer) and any(
            m in made or isinstance(m, QuantInputMixin) for m in parent.modules()
        ):
            parent.activation_relu_or_gelu = 0  # torch's fused path would read the weights without calling a module
    return swapped.get(model, model)
