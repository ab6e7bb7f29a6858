"""Loose layers: those outside of any graph, inside of an island. Each gets an input quantizer of its own."""

from dataclasses import replace

from torch import nn

from bitwright.graph import Capture
from bitwright.graph.names import put_submodule
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of_module
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.preparation.decisions import Decision, Decisions
from bitwright.preparation.region import Job
from bitwright.preparation.rule_targets import module_kind
from bitwright.preparation.swap import give_quantizers, make
from bitwright.preparation.verdicts import judge_loose


def swap_loose(captured: Capture, job: Job) -> Decisions:
    """Swap the layers that no graph calls; return what was decided, by their names."""
    decisions = Decisions()
    for path in captured.loose:
        module = captured.model.get_submodule(path)
        rule = job.recipe.rule_for(job.targets.of_module(path, module))
        cls = qmodule_for(type(module))
        custom = cls if is_custom(cls) and cls is not None and not issubclass(cls, QuantLayer) else None
        drafted = Decision(path, module_kind(module), operator_of_module(module), job.recipe_for(rule), rule, custom)
        decision = replace(drafted, judgement=judge_loose(drafted, cls, job))
        if decision.quantizes:
            made = make(cls, module, path, job.recipe)  # pyrefly: ignore  (it does not quantize without a class)
            give_quantizers(made, path, decision.recipe, job.backend)
            put_submodule(captured.model, path, made)
            decision = with_own_quantizers(decision, path, made)
        decisions.record(path, decision)
    return decisions


def with_own_quantizers(decision: Decision, path: str, module: nn.Module) -> Decision:
    """The decision on a layer that owns its quantizers, with their names."""
    inputs, weights = (
        tuple(f"{path}.{name}".lstrip(".") for name in (f"_{kind}_quantizer",) if module._modules.get(name) is not None)
        for kind in ("input", "weight")
    )
    return replace(decision, inputs=inputs, weight="".join(weights))
