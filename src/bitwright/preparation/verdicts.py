"""Verdicts: in integers, moved along, fused, or float. This file holds every reason that the ledger can give."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.graph.facts import dtype_of, facts
from bitwright.nn.dynamic_recurrent import why_not_dynamic
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.registry import is_custom, torch_base
from bitwright.preparation.decisions import Decision, Judgement, Verdict
from bitwright.preparation.float_tensors import is_float, operands
from bitwright.preparation.region import Job
from bitwright.quantizer import TensorQuantizer

_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # scales are float32 for all of them

# After the first judgement: what becomes of an operator by swapping and fusing.
NO_QMODULE = Judgement(Verdict.FLOAT, "no quantized module is registered for it")
NOT_SWAPPED = Judgement(Verdict.PARTLY, "its weight stays float because it is not swapped")
FOLDED = Judgement(Verdict.FUSED, "folded into the layer before it")
OWN_QUANTIZERS = Judgement(Verdict.INTEGER, "has its own quantizers")
INDICES = Judgement(Verdict.FLOAT, "it computes indices")
NARROW = Judgement(
    Verdict.FLOAT,
    "on CPUs without VNNI, its products would overflow; it runs in integers with weights of 8 bits (weight='auto')",
)
RANKED = Judgement(Verdict.FLOAT, "its values are ranked, and rounding would make some of them equal", keep_float=True)
DYNAMIC = Judgement(Verdict.INTEGER, "the ranges of its inputs and states are found as it runs")


def fused_with(name: str) -> Judgement:
    """An activation that the target computes as part of the operator before it."""
    return Judgement(Verdict.FUSED, f"computed with {name}")


def replaced_by(name: str) -> Judgement:
    """An operator that a schedule replaced by another."""
    return Judgement(Verdict.FUSED, f"replaced by {name}")


def shares_weight(before: Judgement) -> Judgement:
    """A float call of a layer whose weight is quantized for another call."""
    return before._replace(reason=f"{before.reason}, but its weight is quantized for another call")


def leaf(reason: str) -> Judgement:
    """A module that is kept whole."""
    return Judgement(Verdict.FLOAT, f"a leaf {reason}")


def judge(
    node: fx.Node, module: nn.Module | None, decision: Decision, job: Job, exact: Judgement | None = None
) -> Judgement:
    """How a call computes, given its operator, its rule, the backend and its inputs.

    ``exact`` is the verdict if its values must not be rounded.
    """
    if facts(node).leaf:
        return leaf(facts(node).leaf)
    if exact is INDICES:
        return exact
    if decision.brings_quantizers or isinstance(module, QuantInputMixin):
        return _as_written(module, decision, job)
    if decision.skipped:
        return _skipped(decision)
    given = _on_backend(node, module, decision, job.backend) or _unrounded(decision, exact)
    return given or _on_request(decision, job) or _by_recipe(decision, job)


def judge_loose(decision: Decision, cls: type[Any] | None, job: Job) -> Judgement:
    """How a layer outside any graph computes, for which the QModule ``cls`` is registered."""
    known = decision.has_weight and decision.kind in job.backend.operators.integer
    if cls is None or not (known or is_custom(cls)):
        return Judgement(Verdict.FLOAT, "outside of any graph")
    if decision.skipped:
        return _skipped(decision)
    if decision.recipe.weight.floating:
        return _left_float(decision)
    return _on_request(decision, job) or _by_recipe(decision, job)


def _as_written(module: nn.Module | None, decision: Decision, job: Job) -> Judgement:
    """Judge what is a quantizer, has quantizers, or is unknown."""
    if isinstance(module, TensorQuantizer):
        return Judgement(Verdict.INTEGER, "a quantizer placed by hand")
    if isinstance(module, QuantInputMixin):
        return OWN_QUANTIZERS
    if decision.name in job.islands:
        return Judgement(Verdict.FLOAT, "an island: it runs as written, and its layers are listed separately")
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(module, decision, job)
    return Judgement(Verdict.FLOAT, "unknown operator")


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, decision: Decision, job: Job) -> Judgement:
    """Judge what torch computes in one step, which some backends support for LSTMs."""
    if decision.skipped:
        return _skipped(decision)
    hint = "schedules: {split_recurrent: true} quantizes LSTM and GRU"
    if not job.backend.operators.dynamic_lstm:
        return Judgement(Verdict.FLOAT, f"torch computes it in one step; {hint}")
    if not isinstance(module, nn.LSTM) or torch_base(type(module)) is not nn.LSTM:
        return Judgement(Verdict.FLOAT, f"{job.backend.name} has no integer {type(module).__name__}; {hint}")
    weight = decision.recipe.weight
    if weight.floating:
        return _left_float(decision)
    obstacle = why_not_dynamic(module) or job.backend.why_not("weights", weight.quant_spec)
    return Judgement(Verdict.FLOAT, obstacle) if obstacle else DYNAMIC


def _on_backend(node: fx.Node, module: nn.Module | None, decision: Decision, backend: Backend) -> Judgement | None:
    """Say what keeps a call from being quantized, whatever the recipe says; None if nothing does."""
    own_choice = decision.custom is not None or decision.forced
    found = None if own_choice else _by_kind(node, module, decision, backend)
    if found is not None and found.verdict is not Verdict.CARRIED:
        return found
    if found is None and (obstacle := _obstacle(node, operands(node, decision.operator))):
        return Judgement(Verdict.FLOAT, obstacle)
    return found if own_choice else _by_rules(node, decision.kind, found, backend)


def _by_rules(node: fx.Node, kind: str, found: Judgement | None, backend: Backend) -> Judgement | None:
    """Judge a call by the backend's own rules for such operators, or as found before."""
    condition = backend.operators.conditions.get(kind)
    if condition is not None and (obstacle := _asked(condition, node, kind, backend)):
        verdict = Verdict.FLOAT if found is None else Verdict.CARRIED  # what moves values needs no quantizer
        return Judgement(verdict, obstacle, keep_float=True)
    unneeded = backend.operators.unneeded.get(kind) if found is None else None
    return (
        Judgement(Verdict.FLOAT, reason)
        if unneeded is not None and (reason := _asked(unneeded, node, kind, backend))
        else found
    )


def _asked(rule: Callable[[fx.Node], str | None], node: fx.Node, kind: str, backend: Backend) -> str | None:
    """What a backend's function says about a call: a reason in words, or nothing."""
    try:
        said = rule(node)
    except Exception as error:
        problem = f"fails on {node.name}: {type(error).__name__}: {error}"
    else:
        if said is None or isinstance(said, str):
            return said
        problem = f"must return a reason in words or None, not {said!r}"
    raise ConfigError(f"the condition of {backend.name} for {kind} {problem}")


def _by_kind(node: fx.Node, module: nn.Module | None, decision: Decision, backend: Backend) -> Judgement | None:
    """Judge by the operator, and whether the backend has it."""
    operator = decision.operator
    if operator is None:
        return None
    if operator.carries_scale(node, module):
        return Judgement(Verdict.CARRIED)
    if not is_float(node):
        return Judgement(Verdict.FLOAT, "not a float tensor")
    name = operator.name
    if name not in backend.operators.integer:
        return Judgement(Verdict.FLOAT, _why_float(name, backend))
    if name in backend.operators.wide and not backend.uses_all_bits(decision.recipe.weight.quant_spec):
        return NARROW
    if operator.binary and name not in backend.operators.numbers and _one_is_a_number(node):
        return Judgement(Verdict.FLOAT, "one of its operands is a plain number")
    return None


def _why_float(operator: str, backend: Backend) -> str:
    """Why a backend leaves an operator in float that it does not run in integers."""
    default = "nothing to fuse it with" if operator in backend.operators.fused else f"{backend.name} runs it in float"
    return backend.operators.reasons.get(operator, default)


def _one_is_a_number(node: fx.Node) -> bool:
    return sum(is_float(given) for given in (*node.args, *node.kwargs.values())) == 1


def _obstacle(node: fx.Node, inputs: list[fx.Node]) -> str:
    """Why no operator could quantize these inputs, or nothing."""
    if not inputs:
        return "it has no float input"
    if any(dtype_of(n) not in _PRECISIONS for n in inputs):
        return f"its input is {next(dtype_of(n) for n in inputs if dtype_of(n) not in _PRECISIONS)}"
    if any(facts(n).written for n in (node, *inputs)):
        return "it shares memory with a tensor that is written to in place"
    return ""


def _unrounded(decision: Decision, exact: Judgement | None) -> Judgement | None:
    """The verdict on a result that must not be rounded; what a layer with a weight returns is float on most targets."""
    return None if decision.has_weight or decision.forced or decision.custom is not None else exact


def _on_request(decision: Decision, job: Job) -> Judgement | None:
    """Whether an operator stays float because the backend cannot do what is asked, and that is allowed."""
    problem = decision.recipe.problem(job.backend, decision.has_weight) if job.recipe.allow_float else None
    return Judgement(Verdict.FLOAT, f"allowed to stay float: {problem}") if problem else None


def _by_recipe(decision: Decision, job: Job) -> Judgement:
    """Judge by the recipe."""
    placed, weight = any(decision.places(job.backend)), decision.recipe.weight
    if not placed and (not decision.has_weight or weight.floating):
        return _left_float(decision)
    if decision.has_weight and weight.floating:
        return Judgement(Verdict.PARTLY, f"its weight stays float by {_asker(decision)}")
    if decision.has_weight and decision.recipe.input.floating:
        return Judgement(Verdict.PARTLY, f"only its weight is quantized, by {_asker(decision)}")
    if decision.custom is None and decision.kind not in job.backend.operators.integer:
        return Judgement(Verdict.INTEGER, f"forced by {_rule(decision)}: {job.backend.name} runs it in float")
    return Judgement(Verdict.INTEGER)


def _skipped(decision: Decision) -> Judgement:
    return Judgement(Verdict.FLOAT, f"skipped by {_rule(decision)}")


def _left_float(decision: Decision) -> Judgement:
    return Judgement(Verdict.FLOAT, f"left float by {_asker(decision)}")


def _asker(decision: Decision) -> str:
    return _rule(decision) if decision.rule is not None and decision.rule.asks else "the recipe"


def _rule(decision: Decision) -> str:
    return f"the rule {decision.rule.match!r}" if decision.rule is not None else "no rule"
