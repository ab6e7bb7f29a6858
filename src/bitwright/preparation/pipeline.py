"""prepare: from a float model to one that can be calibrated, trained and exported for a backend.

capture → simplify → decide → swap in QModules → fuse → decide on new nodes → place quantizers → ledger
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.garbage import gc_paused
from bitwright.graph import Capture, Leaf, PassResult, capture_model, check_attributes, read_switches, run_stage, runner
from bitwright.graph.capture.leaves import spell
from bitwright.graph.facts import facts, user_name
from bitwright.graph.names import module_of, node_name
from bitwright.graph.rewriting.answers import answers_of
from bitwright.graph.rewriting.schedule import Stage
from bitwright.graph.rewriting.stage import Switches
from bitwright.graph.sketch import sketch
from bitwright.preparation.decide import decide, join_activations, note_skipped
from bitwright.preparation.decisions import Decision, Decisions
from bitwright.preparation.ledger import Ledger, attach, check_unused_rules, entries_of, is_prepared, ledger_of
from bitwright.preparation.operator_recipe import operator_recipe
from bitwright.preparation.place import place
from bitwright.preparation.region import Job, Region
from bitwright.preparation.resolve import resolve_recipe
from bitwright.preparation.rule_targets import RuleTargets
from bitwright.preparation.swap import swap, swap_loose
from bitwright.preparation.tune import tuned
from bitwright.preparation.verdicts import FOLDED, leaf, replaced_by
from bitwright.recipe import Recipe


@torch.inference_mode(False)  # the copy outlives it, and may be trained
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
    tune: str | None = None,
) -> nn.Module:
    """Make a copy of ``model`` that, once calibrated, computes as ``backend`` will.

    Args:
        model: the float model; it is left untouched.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments for ``model``.
        backend: name of the target (see ``bitwright backends``), the path of a YAML file with one, or a Backend.
        recipe: deviations from the backend's defaults: a Recipe, a mapping, a YAML or JSON file, or the name of a
            preset such as ``"W4A8"``.
        weight: spec of all weights, such as ``"int4 narrow channel:0"``; ``"auto"`` for 8 bits if this CPU has VNNI,
            and for the backend's 7 otherwise; ``"auto:vnni"`` or ``"auto:avx2"`` for a target with another CPU.
        activation: spec of all activations.
        skip: layers that stay float: names, globs, ``re:…``, ``op:…``, ``type:…`` or ``node:…``.
        allow_float: if the backend cannot do what is asked for an operator, leave it float and say so in the ledger,
            instead of refusing.
        debug: run the model before and after every schedule, and name the first that changes what it computes.
        leaves: modules that stay whole, run as written, and are not quantized inside: names, globs, classes or
            ``type:Name``. With ``island:`` before it, a module runs as written with its layers quantized one by one.
        preserve_attr: attributes and methods that the result must have, by the module that owns them (``""`` is the
            model): ``{"": ["generate"], "backbone": ["features"]}``. All are kept; those named here are checked.
        concrete_args: arguments of forward that are fixed to these values.
        tune: ``"speed"`` exports the model, times it on the example inputs in the target's runtime, and leaves float
            what is slower in integers; see :func:`bitwright.tune_speed`. The recipe in the ledger has the resulting
            rules, and the ledger's notes say what was gained.

    Returns:
        The prepared model in eval mode, all quantizers off: it still computes exactly what ``model`` does.
    """
    resolved, target = resolve_recipe(backend, recipe, weight, activation, skip, allow_float=allow_float)
    check_attributes(model, preserve_attr or {})
    whole = (*resolved.leaves, *map(spell, [leaves] if isinstance(leaves, str | type) else leaves))
    resolved = resolved.model_copy(update={"leaves": whole})
    resolved, notes = tuned(tune, model, example_inputs, resolved, target, concrete_args)
    made = prepare_resolved(model, example_inputs, resolved, target, concrete_args, debug=debug)
    ledger = ledger_of(made)
    ledger.tuned = notes
    ledger.notes += notes
    return made


@gc_paused()
def prepare_resolved(
    model: nn.Module,
    example_inputs: object,
    recipe: Recipe,
    backend: Backend,
    concrete_args: Mapping[str, Any] | None = None,
    *,
    debug: bool = False,
    answers: Mapping[str, Mapping[str, bool]] | None = None,
) -> nn.Module:
    """Prepare a model by a complete recipe, leaves included.

    ``answers`` are earlier answers to questions that depend on weights, by the path of the graph.
    """
    if is_prepared(model):
        raise ConfigError("this model is prepared already; prepare the float model it was made from")
    captured = capture_model(model, example_inputs, leaves=recipe.leaves, concrete_args=concrete_args)
    for path, known in (answers or {}).items():
        if path in captured.regions:
            answers_of(captured.regions[path]).update(known)
    ledger = Ledger(backend, recipe, captured.example, islands=captured.islands, guards=captured.guards)
    kept = copy.deepcopy(example_inputs)  # the model may write into the user's own at every call
    ledger.arguments = {"example_inputs": kept, "concrete_args": concrete_args}
    _prepare_captured(captured, ledger, debug=debug)
    return captured.model.eval()


def _prepare_captured(captured: Capture, ledger: Ledger, *, debug: bool) -> None:
    recipe, backend = ledger.recipe, ledger.backend
    ledger.before = {path: sketch(graph) for path, graph in captured.regions.items()}
    run = _stage_runner(captured, recipe, backend, ledger, debug=debug)
    job = Job(recipe, backend, RuleTargets(captured.model), captured.islands)
    regions = [Region(path, graph) for path, graph in captured.regions.items()]
    for region in regions:
        if recipe.rules:
            note_skipped(region, job)
        run(region, "simplify")
        decide(region, job, region.model.graph.nodes)
    _check_rules(captured, job)
    for region in regions:
        before = list(region.model.graph.nodes)
        swap(region, job, before)
        run(region, "fuse")
        _decide_again(region, before, job)
        join_activations(region, backend)
        place(region, backend)
        region.finish()
    outside = swap_loose(captured, job)
    for region in regions:
        ledger.entries += entries_of(region.decisions, region.model, backend, region.path)
    ledger.entries += entries_of(outside, captured.model, backend)
    check_unused_rules(recipe, ledger)
    ledger.entries += entries_of(_uncalled_leaves(captured, ledger), captured.model, backend)
    attach(captured.model, ledger)


def _decide_again(region: Region, before: list[fx.Node], job: Job) -> None:
    """Complete a region's table for its current nodes; nodes that are gone since ``before`` became part of others."""
    now, old = list(region.model.graph.nodes), set(before)
    made = [node for node in now if node not in old]
    fresh = [node for node in made if not _inherits(region, node, before)]
    decide(region, job, fresh)
    swap(region, job, fresh)
    successors = {name: node_name(node) for node in made for name in facts(node).replaces}
    for node in old.difference(now):
        if region.decisions.get(node) is not None:
            successor = successors.get(node_name(node))
            region.decisions.judge(node, replaced_by(successor) if successor else FOLDED)


def _inherits(region: Region, node: fx.Node, before: list[fx.Node]) -> bool:
    """Give a node the decision on the one that it replaces, if both call a QModule of the same class."""
    cls = type(module_of(node, region.model))
    for old in before if node.op == "call_module" else ():
        decision = region.decisions.get(old) if node_name(old) in facts(node).replaces else None
        if decision is not None and type(module_of(old, region.model)) is cls:
            region.decisions.record(node, decision._replace(name=region.named(user_name(node))))
            return True
    return False


def _stage_runner(
    captured: Capture, recipe: Recipe, backend: Backend, ledger: Ledger, *, debug: bool
) -> Callable[[Region, Stage], None]:
    """Return a function that runs the schedules of a stage on a region, and notes in the ledger what they did."""
    named = read_switches(recipe.schedules)
    general = operator_recipe(None, recipe, backend)
    defaults = backend.schedules(None if general.input.floating else general.weight.quant_spec)
    switches: Switches = {**{n: on for n, on in defaults.items() if n not in named}, **recipe.schedules}
    check = runner(captured.model, ledger.example.args, ledger.example.kwargs) if debug else None

    def run(region: Region, stage: Stage) -> None:
        results: list[PassResult] = run_stage(region.model, stage, switches, check=check)
        ledger.notes += [f"{result.name}: {line}" for result in results for line in result.notes]

    return run


def _check_rules(captured: Capture, job: Job) -> None:
    """Refuse rules that match nothing in the model."""
    for path in captured.loose:
        job.targets.of_module(path, captured.model.get_submodule(path))
    job.recipe.check_rules(job.targets.seen)


def _uncalled_leaves(captured: Capture, ledger: Ledger) -> Decisions:
    """The leaves that no graph calls, such as those inside an island."""
    decisions, named = Decisions(), {entry.name for entry in ledger.entries}
    for path, reason in captured.leaves.items():
        if path not in named:
            kind = type(captured.model.get_submodule(path)).__name__
            decisions.record(path, Decision(path, kind, judgement=leaf(reason)))
    return decisions
