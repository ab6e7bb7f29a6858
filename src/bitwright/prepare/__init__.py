"""Prepare: from a float model to one that can be calibrated, trained and exported for a backend."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import BACKENDS, Backend
from bitwright.errors import ConfigError
from bitwright.graph import Capture, Leaf, capture, check_attributes, run_stage
from bitwright.graph.pause import collection_paused
from bitwright.nn.operators import operator_of_module
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.prepare.decide import Decision, decide, join_activations, leaf_reason, node_name, tensor_recipes
from bitwright.prepare.ledger import Entry, Ledger, Verdict, attach, is_prepared, ledger_of
from bitwright.prepare.place import place
from bitwright.prepare.swap import build, give_quantizers, make, note_quantizers, put_submodule, swap
from bitwright.recipe import Recipe, Rule, TensorRecipe

__all__ = ["Entry", "Ledger", "Verdict", "check_wishes", "ledger_of", "node_name", "prepare"]


@collection_paused()
def prepare(
    model: nn.Module,
    example_inputs: Any,  # noqa: ANN401
    backend: str | Backend | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    weight: str | None = None,
    activation: str | None = None,
    skip: Iterable[str] = (),
    leaves: Iterable[Leaf] = (),
    preserve_attr: Mapping[str, Iterable[str]] | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a copy of ``model`` that computes as ``backend`` will, once calibrated.

    Args:
        model: the float model; it is left untouched.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for ``model``.
        backend: name of the target (see ``bitwright backends``), or a Backend.
        recipe: wishes beyond the backend's defaults: a Recipe, a mapping, or a YAML file.
        weight: spec of all weights, such as ``"int4 narrow channel:0"``.
        activation: spec of all activations.
        skip: layers that stay float: names, globs, ``re:…`` or ``op:…``.
        leaves: modules that stay whole, run as written, and are not quantized inside: names, globs, classes or
            ``type:Name``.
        preserve_attr: attributes and methods that the result must have, by the module that has them (``""`` is the
            model): ``{"": ["generate"], "backbone": ["features"]}``. All are kept; those named here are checked.
        concrete_args: arguments of forward that are fixed to these values.

    Returns:
        The prepared model in eval mode, all quantizers off: it still computes exactly what ``model`` does.
    """
    wishes, target = check_wishes(backend, recipe, weight, activation, skip)
    if is_prepared(model):
        raise ConfigError("this model is prepared already; prepare the float model it was made from")
    check_attributes(model, preserve_attr or {})
    whole = (*wishes.leaves, *([leaves] if isinstance(leaves, str | type) else leaves))
    captured = capture(model, example_inputs, leaves=whole, concrete_args=concrete_args)
    ledger = Ledger(target, wishes, captured.example, islands=captured.islands, decisions=captured.decisions)
    graphs = _decide_all(captured, wishes, target, ledger)
    for prefix, decisions in graphs.items():
        region = captured.regions[prefix]
        swap(region, decisions, wishes, target)
        ledger.notes += run_stage(region, "fuse")
        alive = _alive(region, decisions)
        join_activations(alive, target)
        place(region, alive, wishes, target, prefix)
        for decision in decisions.values():
            decision.entry.weight = _weight_spec(region, decision)
        region.graph.lint()
        region.recompile()
    _swap_loose(captured, wishes, target, ledger)
    _note_leaves(captured, ledger)
    attach(captured.model, ledger)
    return captured.model.eval()


def check_wishes(
    backend: str | Backend | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    weight: str | None,
    activation: str | None,
    skip: Iterable[str],
) -> tuple[Recipe, Backend]:
    """Read all wishes as one recipe for one backend, and refuse what cannot be before any work is done."""
    wishes = Recipe.parse(recipe if recipe is not None else {})
    if isinstance(skip, str):
        skip = [skip]
    skips = Recipe.parse({"rules": [{"match": s, "skip": True} for s in skip]}).rules
    changes: dict[str, Any] = {"rules": (*wishes.rules, *skips)}
    if weight is not None:
        changes["weight"] = Recipe.parse({"weight": weight}).weight.over(wishes.weight)
    if activation is not None:
        changes["activation"] = Recipe.parse({"activation": activation}).activation.over(wishes.activation)
    if isinstance(backend, str):
        changes["backend"] = backend
    wishes = wishes.model_copy(update=changes)
    if backend is not None and not isinstance(backend, str | Backend):
        raise ConfigError(f"backend must be a name or a Backend, not {backend!r}")
    target = backend if isinstance(backend, Backend) else BACKENDS.get(wishes.backend)
    for rule in ({"": wishes, **{r.match: r for r in wishes.rules}}).items():
        _check_wish(*rule, target)
    return wishes, target


def _check_wish(match: str, wish: Recipe | Rule, target: Backend) -> None:
    """Refuse now what the backend could not run, and names that nothing answers to."""
    where = f"the rule {match!r}" if match else "the recipe"
    if wish.weight.spec is not None:
        target.check_weight(wish.weight.spec, where)
    if wish.activation.spec is not None:
        target.check_activation(wish.activation.spec, where)
    for tensor in (wish.weight, wish.activation):
        build(tensor, tensor.spec or target.activation, "")


def _decide_all(captured: Capture, wishes: Recipe, target: Backend, ledger: Ledger) -> dict[str, dict[Any, Decision]]:
    graphs: dict[str, dict[Any, Decision]] = {}
    known: list[tuple[str, str, str]] = []
    for prefix, region in captured.regions.items():
        ledger.notes += run_stage(region, "simplify")
        graphs[prefix] = decide(region, prefix, wishes, target)
        for decision in graphs[prefix].values():
            ledger.entries.append(decision.entry)
            scope = ".".join(p for p in (prefix, decision.node.meta.get("scope", "")) if p)
            known.append((decision.entry.name, scope, decision.entry.operator))
    for path in captured.loose:
        operator = operator_of_module(captured.model.get_submodule(path))
        known.append((path, path, operator.name if operator else ""))
    wishes.check_rules(known)
    return graphs


def _alive(region: Any, decisions: dict[Any, Decision]) -> dict[Any, Decision]:  # noqa: ANN401
    """The decisions of the nodes that fusing has left; what it took is part of the layer before."""
    present = set(region.graph.nodes)
    for node, decision in decisions.items():
        if node not in present:
            decision.entry.verdict, decision.entry.reason = Verdict.FUSED, "folded into the layer before it"
    return {n: d for n, d in decisions.items() if n in present}


def _weight_spec(region: nn.Module, decision: Decision) -> str:
    if decision.verdict is not Verdict.INTEGER or decision.node.op != "call_module":
        return ""
    module = region.get_submodule(str(decision.node.target))
    quantizer = getattr(module, "_weight_quantizer", None)
    return "" if quantizer is None else str(quantizer.spec)


def _note_leaves(captured: Capture, ledger: Ledger) -> None:
    """Enter the leaves that no graph calls, as those inside of an island."""
    named = {entry.name for entry in ledger.entries}
    for path, wish in captured.leaves.items():
        if path not in named:
            kind = type(captured.model.get_submodule(path)).__name__
            ledger.entries.append(Entry(path, kind, Verdict.FLOAT, leaf_reason(wish)))


def _swap_loose(captured: Capture, wishes: Recipe, target: Backend, ledger: Ledger) -> None:
    """Swap the layers that stand outside of any graph, each with an input quantizer of its own."""
    for path in captured.loose:
        module = captured.model.get_submodule(path)
        operator = operator_of_module(module)
        kind = operator.name if operator else type(module).__name__
        rule = wishes.rule_for(path, path, kind)
        entry = Entry(path, kind, Verdict.FLOAT, "outside of any graph", rule.match if rule else "")
        ledger.entries.append(entry)
        cls = qmodule_for(type(module))
        known = operator is not None and operator.weight and operator.name in target.integer
        if cls is None or not (known or is_custom(cls)):
            continue
        if rule is not None and rule.skip:
            entry.reason = f"skipped by the rule {rule.match!r}"
            continue
        weight, activation = _loose_recipes(rule, wishes, target)
        qmodule = make(cls, module, path, wishes)
        give_quantizers(qmodule, path, weight, activation, target)
        put_submodule(captured.model, path, qmodule)
        note_quantizers(entry, qmodule)


def _loose_recipes(rule: Rule | None, wishes: Recipe, target: Backend) -> tuple[TensorRecipe, TensorRecipe]:
    probe = Decision(None, None, Entry("", "", Verdict.INTEGER), rule)  # pyrefly: ignore
    return tensor_recipes(probe, wishes, target)
