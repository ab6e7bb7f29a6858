"""prepare: from a float model to one that can be calibrated, trained and exported for a backend."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.backends import BACKENDS, Backend, find_backend
from bitwright.errors import ConfigError
from bitwright.graph import Capture, Leaf, PassResult, capture_model, check_attributes, read_switches, run_stage, runner
from bitwright.graph.capture.pause import collection_paused
from bitwright.graph.names import put_submodule
from bitwright.graph.rewriting.stage import Switches
from bitwright.graph.sketch import sketch
from bitwright.nn.operators import operator_of_module
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.preparation.decide import Decision, decide, join_activations, leaf_reason
from bitwright.preparation.decide_again import decide_again
from bitwright.preparation.ledger import Entry, Ledger, Verdict, attach, is_prepared
from bitwright.preparation.place import place
from bitwright.preparation.rule_targets import Subjects
from bitwright.preparation.swap import give_quantizers, make, note_quantizers, swap
from bitwright.preparation.unused_rules import check_effects
from bitwright.preparation.wishes import check, complete
from bitwright.recipe import Recipe, Subject


@collection_paused()
def prepare(
    model: nn.Module,
    example_inputs: Any,  # noqa: ANN401
    backend: str | Path | Backend | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    weight: str | None = None,
    activation: str | None = None,
    skip: Iterable[str] = (),
    allow_float: bool = False,
    debug: bool = False,
    leaves: Iterable[Leaf] = (),
    preserve_attr: Mapping[str, Iterable[str]] | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a copy of ``model`` that computes as ``backend`` will, once calibrated.

    Args:
        model: the float model; it is left untouched.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for ``model``.
        backend: name of the target (see ``bitwright backends``), the path of a YAML file with one, or a Backend.
        recipe: wishes beyond the backend's defaults: a Recipe, a mapping, a YAML or JSON file, or the name of a preset
            such as ``"W4A8"``.
        weight: spec of all weights, such as ``"int4 narrow channel:0"``.
        activation: spec of all activations.
        skip: layers that stay float: names, globs, ``re:…``, ``op:…``, ``type:…`` or ``node:…``.
        allow_float: leave an operator float where the backend cannot do what is asked, and say so in the ledger,
            instead of refusing.
        debug: run the model before and after every schedule, and name the first that changes what it computes.
        leaves: modules that stay whole, run as written, and are not quantized inside: names, globs, classes or
            ``type:Name``.
        preserve_attr: attributes and methods that the result must have, by the module that has them (``""`` is the
            model): ``{"": ["generate"], "backbone": ["features"]}``. All are kept; those named here are checked.
        concrete_args: arguments of forward that are fixed to these values.

    Returns:
        The prepared model in eval mode, all quantizers off: it still computes exactly what ``model`` does.
    """
    wishes, target = check_wishes(backend, recipe, weight, activation, skip, allow_float=allow_float)
    if is_prepared(model):
        raise ConfigError("this model is prepared already; prepare the float model it was made from")
    check_attributes(model, preserve_attr or {})
    whole = (*wishes.leaves, *([leaves] if isinstance(leaves, str | type) else leaves))
    captured = capture_model(model, example_inputs, leaves=whole, concrete_args=concrete_args)
    ledger = Ledger(target, wishes, captured.example, islands=captured.islands, decisions=captured.decisions)
    ledger.before = {prefix: sketch(region) for prefix, region in captured.regions.items()}
    rerun = runner(captured.model, ledger.example.args, ledger.example.kwargs) if debug else None
    subjects = Subjects(captured.model)
    named = read_switches(wishes.schedules)
    switches = {**wishes.schedules, **{name: on for name, on in target.schedules.items() if name not in named}}
    graphs = _decide_all(captured, wishes, target, ledger, subjects, switches, rerun)
    for prefix, decisions in graphs.items():
        region = captured.regions[prefix]
        swap(region, decisions, wishes, target)
        before = set(region.graph.nodes)
        ledger.notes += _lines(run_stage(region, "fuse", switches, check=rerun))
        alive = decide_again(region, before, decisions, wishes, target, subjects, prefix)
        ledger.entries += [d.entry for n, d in alive.items() if n not in decisions]
        join_activations(alive, target)
        place(region, alive, target, prefix)
        for decision in alive.values():
            decision.entry.weight = _weight_spec(region, decision)
        region.graph.lint()
        region.recompile()
    _swap_loose(captured, wishes, target, ledger, subjects)
    check_effects(wishes, ledger)
    _note_leaves(captured, ledger)
    attach(captured.model, ledger)
    return captured.model.eval()


def check_wishes(
    backend: str | Path | Backend | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    weight: str | None,
    activation: str | None,
    skip: Iterable[str],
    *,
    allow_float: bool = False,
) -> tuple[Recipe, Backend]:
    """Read all wishes as one recipe for one backend, and refuse what cannot be before any work is done."""
    wishes = Recipe.parse(recipe if recipe is not None else {})
    if isinstance(skip, str):
        skip = [skip]
    skips = Recipe.parse({"rules": [{"match": s, "skip": True} for s in skip]}).rules
    changes: dict[str, Any] = {"rules": (*wishes.rules, *skips), "allow_float": wishes.allow_float or allow_float}
    if weight is not None:
        changes["weight"] = Recipe.parse({"weight": weight}).weight.over(wishes.weight)
    if activation is not None:
        changes["activation"] = Recipe.parse({"activation": activation}).activation.over(wishes.activation)
    source = backend if backend is not None else wishes.backend
    target = find_backend(source)
    changes["backend"] = str(source) if target.name not in BACKENDS else target.name
    if isinstance(source, Backend):
        changes["backend"] = source.name
    wishes = wishes.model_copy(update=changes)
    check(wishes, target)
    read_switches(wishes.schedules)
    return wishes, target


def _decide_all(
    captured: Capture,
    wishes: Recipe,
    target: Backend,
    ledger: Ledger,
    subjects: Subjects,
    switches: Switches,
    rerun: Callable[[], Any] | None,
) -> dict[str, dict[Any, Decision]]:
    graphs: dict[str, dict[Any, Decision]] = {}
    known: list[Subject] = []
    for prefix, region in captured.regions.items():
        known += _called_modules(region, prefix, subjects)  # also those that simplifying takes away
        ledger.notes += _lines(run_stage(region, "simplify", switches, check=rerun))
        graphs[prefix] = decide(region, prefix, wishes, target, subjects)
        for decision in graphs[prefix].values():
            if decision.entry.name in captured.islands:
                decision.entry.reason = "an island: it runs as written, and its layers are entered on their own"
            ledger.entries.append(decision.entry)
            known.append(decision.subject)
    known += [subjects.of_module(path, _kind(captured.model.get_submodule(path))) for path in captured.loose]
    wishes.check_rules(known)
    return graphs


def _called_modules(region: Any, prefix: str, subjects: Subjects) -> list[Subject]:  # noqa: ANN401
    modules = dict(region.named_modules())
    called = {str(n.target): n for n in region.graph.nodes if n.op == "call_module"}
    return [
        subjects.of_node(node, f"{prefix}.{name}" if prefix else name, prefix, _kind(modules[name]))
        for name, node in called.items()
    ]


def _lines(results: list[PassResult]) -> list[str]:
    return [f"{result.name}: {line}" for result in results for line in result.notes]


def _weight_spec(region: nn.Module, decision: Decision) -> str:
    if not decision.quantizes or decision.node.op != "call_module":
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


def _swap_loose(captured: Capture, wishes: Recipe, target: Backend, ledger: Ledger, subjects: Subjects) -> None:
    """Swap the layers that stand outside of any graph, each with an input quantizer of its own."""
    for path in captured.loose:
        module = captured.model.get_submodule(path)
        operator = operator_of_module(module)
        kind = _kind(module)
        rule = wishes.rule_for(subjects.of_module(path, kind))
        entry = Entry(path, kind, Verdict.FLOAT, "outside of any graph", rule.match if rule else "")
        ledger.entries.append(entry)
        cls = qmodule_for(type(module))
        known = operator is not None and operator.weight and operator.name in target.operators.integer
        if cls is None or not (known or is_custom(cls)):
            continue
        if rule is not None and rule.skip:
            entry.reason = f"skipped by the rule {rule.match!r}"
            continue
        asked = complete(rule, wishes, target)
        problem = asked.problem(target, operator is not None and operator.weight)
        if problem or asked.weight.floating:
            entry.reason = f"allowed to stay float: {problem}" if problem else "left float by the recipe"
            continue
        qmodule = make(cls, module, path, wishes)
        give_quantizers(qmodule, path, asked, target)
        put_submodule(captured.model, path, qmodule)
        note_quantizers(entry, qmodule)


def _kind(module: nn.Module) -> str:
    operator = operator_of_module(module)
    return operator.name if operator else type(module).__name__
