"""Capture: from a model and example inputs to a graph, or to several graphs around what cannot be traced.

A module whose Python cannot be traced becomes an *island*: it runs as written, and its children are captured
separately, down to single modules. So no model makes capture fail, and what happened is on record. A bug of our own
is an error, not an island.
"""

import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from bitwright.errors import CaptureError, CaptureWarning, ConfigError, UnknownNameError, suggest
from bitwright.garbage import gc_paused
from bitwright.graph.capture.copying import copy_model
from bitwright.graph.capture.failures import Overwritten, call_model, frames_to_user, reason_for
from bitwright.graph.capture.guards import Guard
from bitwright.graph.capture.hooks import CHANGED, changed_by_hooks
from bitwright.graph.capture.islands import first_calls, is_single, parts
from bitwright.graph.capture.leaves import ISLAND, Leaf, find_leaves, outermost
from bitwright.graph.capture.nesting import proxies_in
from bitwright.graph.capture.parity import first_deviation
from bitwright.graph.capture.patches import capturing
from bitwright.graph.capture.tracer import ValueTracer
from bitwright.graph.capture.trial_run import trial_run
from bitwright.graph.capture.unwrap import fold_parametrizations, unwrap
from bitwright.graph.differences import difference
from bitwright.graph.facts import facts, set_facts
from bitwright.graph.inputs import Inputs, bind_inputs, caller
from bitwright.graph.model import CapturedModel, why_no_graph
from bitwright.graph.walks import needed_for
from bitwright.nn.operators import keep_whole
from bitwright.torch_internals import compiled_original

_log = logging.getLogger(__name__)


@dataclass
class Capture:
    """What capture made of a model.

    Attributes:
        model: the result: a CapturedModel, or the user's own class where the root is an island.
        regions: every graph in it, by the qualified name of the module it stands for ("" is the whole model).
        loose: modules outside any graph, to be swapped one by one.
        islands: modules that run as written, with the reason.
        leaves: modules kept whole, with the reason: a wish, or hooks that change what a layer computes.
        guards: numbers of the example inputs that the graphs rely on.
        example: the example inputs as the result takes them, without arguments that are fixed.
    """

    model: nn.Module
    regions: dict[str, CapturedModel] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    islands: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    example: Inputs = field(default_factory=Inputs)


def capture_model(
    model: nn.Module,
    example_inputs: object,
    *,
    leaves: Iterable[Leaf] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> Capture:
    """Capture what ``model`` computes on ``example_inputs``; the model itself is left untouched.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        leaves: modules that stay whole and are not looked into: names, globs, classes or ``type:Name``.
        concrete_args: arguments of forward that are fixed: part of the program, not inputs of the graph.
    """
    _check_model(model)
    try:
        model = compiled_original(model) or model
        inputs = _with_fixed(model, Inputs.of(example_inputs), concrete_args or {})
        with torch.no_grad(), capturing(), gc_paused():
            captured = _Capturing(model, inputs, leaves, frozenset(concrete_args or ())).run()
    except Exception as error:
        reason_for(error)  # if the failure is ours, it raises an error that says so
        raise
    if "" in captured.islands:
        warnings.warn(
            f"{type(model).__name__} runs as written, without a graph: {captured.islands['']}. Its layers are "
            "quantized one by one; nothing is fused or shared between them. To have it captured, move what the reason "
            "names into a submodule: then only that submodule runs as written",
            CaptureWarning,
            stacklevel=frames_to_user(),
        )
    return captured


def _check_model(model: object) -> None:
    """Refuse what no graph can be captured of."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}: create one" if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"the model must be a torch.nn.Module, not {given}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"the model is a TorchScript {type(model).__name__}, whose code cannot be captured: give the nn.Module "
            "that it was made from. A part of a model may be one; it stays float, and cannot be exported"
        )
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise ConfigError(
            f"{empty} is on the meta device, where it has no values: bw.map_weights(model, 'model.safetensors') gives "
            "a model its weights without reading them into memory"
        )


class _Capturing:
    """One capture: the original, its results, and the attempts to make a copy compute the same."""

    def __init__(self, model: nn.Module, inputs: Inputs, wishes: Iterable[Leaf], fixed: frozenset[str]) -> None:
        self.model, self.wishes, self.fixed = model, wishes, fixed
        self.inputs: Inputs = call_model(copy.deepcopy, inputs)  # the user may go on to write into them
        self.leaves: dict[str, str] = {}
        self.folds = True  # whether parametrized weights are computed once
        self.known_islands: dict[str, str] = {}
        self.filled: dict[str, str] = {}  # attributes that are containers, and hold other things after each call
        self.memos: dict[str, str] = {}  # those that hold other things after the first call only
        self.origin: dict[int, torch.Tensor] = {}  # by the id of a tensor in the copy: the one it is a copy of
        self.result = Capture(model)

    def run(self) -> Capture:
        root = self._fresh(fold=False)
        if any(map(is_lazy, (*root.parameters(), *root.buffers()))):
            with torch.no_grad():
                self._first_run(root)  # which gives lazy modules their sizes, in this copy
            self.model = root
            root = self._fresh(fold=False)
        wished = find_leaves(root, self.wishes)
        self.known_islands = {path: f"by request: {wish!r}" for path, wish in wished.items() if wish.startswith(ISLAND)}
        leaves = {path: f"by request: {wish!r}" for path, wish in wished.items() if path not in self.known_islands}
        with trial_run(root, self.origin) as record, changed_by_hooks(root) as changed:
            expected = [self._first_run(root)]
        self.leaves = outermost(leaves | {path: CHANGED for path in changed if path not in self.known_islands})
        paths = {module: path for path, module in root.named_modules()}
        stateful = [path for module, path in paths.items() if module in record.changed]
        self.filled = _named(record.filled, paths)
        root = self._with_weights_computed_once(root, expected)
        if stateful:
            expected = self._results_of_two_calls(root)
        reason = self._attempt(root, expected)
        if reason and stateful:
            self.known_islands |= dict.fromkeys(stateful, "it keeps state from call to call")
            reason = self._attempt(self._fresh(), expected)
        if reason:
            self._last_attempt(expected, reason)
        return self.result

    def _results_of_two_calls(self, root: nn.Module) -> list[Any]:
        """The results of two calls, which show whether state matters; tell memos from what changes at each call."""
        paths = {module: path for path, module in root.named_modules()}
        with trial_run(root, self.origin):
            expected = [self._call(root, self.inputs) for _ in range(2)]
            with trial_run(root) as again:
                self._call(root, self.inputs)
        settled = self.filled.keys() - _named(again.filled, paths).keys()
        self.memos = {name: self.filled.pop(name) for name in settled}
        return expected

    def _last_attempt(self, expected: list[Any], reason: str) -> None:
        self.result = self._module_by_module(self._fresh(), reason)
        if not self._agrees(expected):
            raise CaptureError(
                f"the captured {type(self.model).__name__} and the original compute different results on the "
                f"example inputs, even where it runs as written; first: {reason}"
            )

    def _with_weights_computed_once(self, root: nn.Module, expected: list[Any]) -> nn.Module:
        """Compute parametrized weights once, unless that changes what the model computes, as with random weights."""
        self.folds = fold_parametrizations(root)
        if not self.folds:
            return root
        with trial_run(root):
            self.folds = not difference([self._call(root, self.inputs)], expected)
        return root if self.folds else self._fresh()

    def _first_run(self, root: nn.Module) -> Any:
        try:
            return self._call(root, self.inputs)
        except Exception as error:
            numbers = self.inputs.args and all(isinstance(value, int) for value in self.inputs.args)
            hint = f"; if that is a shape, give torch.randn{self.inputs}" if numbers else ""
            raise ConfigError(
                f"{type(root).__name__} does not take the example inputs {self.inputs}: {type(error).__name__}: "
                f"{error}{hint}"
            ) from error

    def _call(self, model: nn.Module, inputs: Inputs) -> Any:
        """What a model returns, and its arguments, which it may have written into."""
        values = call_model(copy.deepcopy, inputs)
        result = call_model(model, *values.args, **values.kwargs)
        return result, () if self.fixed else (values.args, values.kwargs)

    def _fresh(self, *, fold: bool = True) -> nn.Module:
        try:
            copied, self.origin = copy_model(self.model)
        except Exception as error:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be copied, and prepare works on a copy: {reason_for(error)}"
            ) from error
        copied = unwrap(copied).eval()
        if fold and self.folds:
            fold_parametrizations(copied)
        return copied

    def _attempt(self, root: nn.Module, expected: list[Any]) -> str:
        """Capture into ``result``; return why the attempt failed, or nothing."""
        self.result = Capture(root, leaves=self.leaves)
        for path in self.leaves:
            keep_whole(root.get_submodule(path))
        try:
            if "" in self.known_islands:
                self._make_island(root, "", self.known_islands[""], self.inputs)
            else:
                self._capture_module(root, "", self.inputs)
            if self._agrees(expected):
                return ""
            first = first_deviation(self.result.model, self._fresh(), self.inputs)
        except Exception as error:
            return reason_for(error)
        return f"its graph deviates from the original, first at {first}"

    def _agrees(self, expected: list[Any]) -> bool:
        result = self.result
        result.example = self.inputs
        if "" in result.regions and self.fixed:
            taken = {str(n.target) for n in result.regions[""].graph.nodes if n.op == "placeholder"}
            result.example = self.inputs.without(self.model, self.fixed - taken)
        with trial_run(result.model, self.origin):
            got = [self._call(result.model, result.example) for _ in expected]
        return not difference(got, expected)

    def _capture_module(self, module: nn.Module, path: str, inputs: Inputs) -> None:
        """Capture one module, or make it an island."""
        if reason := why_no_graph(module):
            self._make_island(module, path, reason, inputs)
            return
        islands = _inside(self.known_islands, path)
        whole = _inside(self.leaves, path)
        try:
            tracer = self._trace(module, path, inputs, islands, whole)
            tracer.keep_constants()
            graph_model = CapturedModel.build(module, tracer.graph)
        except Exception as error:
            self._make_island(module, path, reason_for(error, path), inputs)
            return
        self.result.guards += tracer.guards.values()
        self._put(path, graph_model)
        calls = [node for node in tracer.graph.nodes if node.op == "call_module"]
        for node in [n for n in calls if n.target in whole]:
            set_facts(node, leaf=whole[str(node.target)])
        self._make_islands(module, path, islands, calls, inputs)

    def _make_islands(
        self, module: nn.Module, path: str, islands: dict[str, str], calls: list[fx.Node], inputs: Inputs
    ) -> None:
        """Make islands of those parts of a module that its graph calls."""
        reached = [name for name in dict.fromkeys(str(node.target) for node in calls) if name in islands]
        given = first_calls(module, reached, inputs, self.origin)
        for name in reached:
            self._make_island(module.get_submodule(name), _join(path, name), islands[name], given.get(name))

    def _trace(
        self, module: nn.Module, path: str, inputs: Inputs, islands: dict[str, str], whole: dict[str, str]
    ) -> ValueTracer:
        """Record one module; add what fails inside it to ``islands`` until the rest succeeds."""
        fixed = self.fixed if not path else frozenset()
        call = caller(module, inputs.args, inputs.kwargs)
        record_all = False
        while True:
            tracer = ValueTracer({**islands, **whole}, record_all, _inside(self.filled, path))
            values = call_model(copy.deepcopy, bind_inputs(module, inputs.args, inputs.kwargs))
            try:
                with trial_run(module, self.origin):
                    tracer.trace_call(module, values, call, fixed)
                    if not self._keeps_data(module, path):
                        return tracer
            except Exception as error:
                failed = tracer.failed_in or ""
                if isinstance(error, Overwritten) and not record_all:
                    record_all = True
                elif failed == "" or failed in islands:
                    raise
                else:
                    islands[failed] = reason_for(error, _join(path, failed))

    def _keeps_data(self, module: nn.Module, path: str) -> bool:
        """Whether a memo holds results computed from an input's data, whose purpose is then unknown."""
        found = []
        for name in _inside(self.memos, path):
            held = functools.reduce(getattr, name.split("."), module)
            computed = needed_for([proxy.node for proxy in proxies_in(held)], lambda n: not facts(n).plain)
            found += [_join(path, name)] if any(n.op == "placeholder" for n in computed) else []
        self.filled |= {name: self.memos.pop(name) for name in found}
        return bool(found)

    def _make_island(self, module: nn.Module, path: str, reason: str, inputs: Inputs | None) -> None:
        """Run a module as written, and capture those of its parts that are called on the example inputs."""
        self.result.islands[path] = reason
        _log.info("%s runs as written (%s); its submodules are captured separately", path or "the model", reason)
        children = {name: part for name, part in parts(module) if _join(path, name) not in self.leaves}
        inner = [name for name, part in children.items() if not is_single(part)]
        self.result.loose += [_join(path, name) for name in children if name not in inner]
        calls = first_calls(module, inner, inputs, self.origin)
        for name in inner:
            place = _join(path, name)
            if place not in self.known_islands and name in calls:
                self._capture_module(children[name], place, calls[name])
            else:
                reason = self.known_islands.get(place, "not called on the example inputs")
                self._make_island(children[name], place, reason, calls.get(name))

    def _module_by_module(self, root: nn.Module, reason: str) -> Capture:
        """The last resort: run the whole model as written, and swap its layers one by one."""
        kept = tuple(f"{leaf}." for leaf in self.leaves)
        loose = [p for p, m in root.named_modules() if p and is_single(m) and not f"{p}.".startswith(kept)]
        return Capture(root, loose=loose, islands={"": reason}, leaves=self.leaves)

    def _put(self, path: str, module: CapturedModel) -> None:
        self.result.regions[path] = module
        if path:
            self.result.model.set_submodule(path, module)
        else:
            self.result.model = module


def _with_fixed(model: nn.Module, inputs: Inputs, fixed: Mapping[str, Any]) -> Inputs:
    """The example inputs together with the fixed arguments, by forward's names for them."""
    if not fixed:
        return inputs
    if not isinstance(fixed, Mapping):
        raise ConfigError(f"concrete_args must be a dict of argument names and values, not {fixed!r}")
    known = list(inspect.signature(model.forward).parameters)
    for name in fixed:
        if name not in known:
            raise UnknownNameError(f"{type(model).__name__}.forward has no argument {name!r}{suggest(name, known)}")
    return inputs.with_values(model, fixed)


def _inside(paths: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The paths below ``prefix``, as seen from there."""
    start = f"{prefix}." if prefix else ""
    return {p.removeprefix(start): text for p, text in paths.items() if p.startswith(start) and p != prefix}


def _named(attributes: Iterable[tuple[nn.Module, str]], paths: Mapping[nn.Module, str]) -> dict[str, str]:
    """Attributes of modules by their qualified names."""
    return {_join(paths[module], name): "" for module, name in attributes}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
