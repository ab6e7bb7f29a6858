"""Capture: from a model and example inputs to a graph, or to several graphs around what cannot be traced.

A module whose Python cannot be traced becomes an *island*: it runs as written, and its children are captured
on their own, down to single modules. So capture never fails; what happened is on record.
"""

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwright.errors import CaptureError, ConfigError, UnknownNameError, suggest
from bitwright.graph.capture.copying import copy_model
from bitwright.graph.capture.guards import Decision, users_line
from bitwright.graph.capture.islands import first_calls, is_single, parts
from bitwright.graph.capture.leaves import Leaf, find_leaves
from bitwright.graph.capture.parity import first_deviation, same
from bitwright.graph.capture.pause import collection_paused
from bitwright.graph.capture.proxy import Overwritten
from bitwright.graph.capture.rehearsal import rehearsal
from bitwright.graph.capture.tracer import ValueTracer
from bitwright.graph.facts import set_facts
from bitwright.graph.inputs import Inputs, bind_inputs, caller
from bitwright.graph.model import CapturedModel

_log = logging.getLogger(__name__)


@dataclass
class Capture:
    """What capture made of a model.

    Attributes:
        model: the result: a CapturedModel, or the user's own class where the root is an island.
        regions: every graph in it, by the qualified name of the module it stands for ("" is the whole model).
        loose: modules that stand outside of any graph, to be swapped one by one.
        islands: modules that run as written, with the reason.
        leaves: modules that were asked to stay whole, with the wish that named them.
        decisions: numbers of the example inputs that the graphs rely on.
        example: the example inputs as the result takes them, without arguments that are fixed.
    """

    model: nn.Module
    regions: dict[str, CapturedModel] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    islands: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    example: Inputs = field(default_factory=Inputs)


def capture_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    leaves: Iterable[Leaf] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> Capture:
    """Capture ``model`` as it computes on ``example_inputs``; the model itself is left untouched.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        leaves: modules that stay whole and are not looked into: names, globs, classes or ``type:Name``.
        concrete_args: arguments of forward that are fixed: part of the program, not inputs of the graph.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    whole = find_leaves(model, leaves)
    inputs = _with_fixed(model, Inputs.of(example_inputs), concrete_args or {})
    with torch.no_grad(), _plain_attention(), collection_paused():
        return _Capturing(model, inputs, whole, frozenset(concrete_args or ())).run()


class _Capturing:
    """One capture: the original, what it computes, and the attempts to have a copy compute the same."""

    def __init__(self, model: nn.Module, inputs: Inputs, leaves: dict[str, str], fixed: frozenset[str]) -> None:
        self.model, self.inputs, self.leaves, self.fixed = model, inputs, leaves, fixed
        self.known_islands: dict[str, str] = {}
        self.origin: dict[int, torch.Tensor] = {}  # by the id of a tensor in the copy: the one it is a copy of
        self.result = Capture(model)

    def run(self) -> Capture:
        root = self._fresh()
        with rehearsal(root, self.origin) as record:
            expected = [_first_run(root, copy.deepcopy(self.inputs))]
        stateful = [path for path, module in root.named_modules() if module in record.changed]
        if stateful:  # then what the second call gives says whether the state matters
            with rehearsal(root, self.origin):
                expected = [_call(root, self.inputs) for _ in range(2)]
        reason = self._attempt(root, expected)
        if reason and stateful:
            self.known_islands = dict.fromkeys(stateful, "it keeps state from call to call")
            reason = self._attempt(self._fresh(), expected)
        if reason:
            self.result = self._module_by_module(self._fresh(), reason)
            if not self._agrees(expected):
                raise CaptureError(
                    f"the captured {type(self.model).__name__} does not compute what the original does on the example "
                    f"inputs, even where it runs as written; at first: {reason}"
                )
        return self.result

    def _fresh(self) -> nn.Module:
        copied, self.origin = copy_model(self.model)
        return copied.eval()

    def _attempt(self, root: nn.Module, expected: list[Any]) -> str:
        """Capture into ``result``; return why it is of no use, or nothing."""
        self.result = Capture(root, leaves=self.leaves)
        try:
            if "" in self.known_islands:
                self._make_island(root, "", self.known_islands[""], self.inputs)
            else:
                self._capture_module(root, "", self.inputs)
            if self._agrees(expected):
                return ""
        except Exception as error:
            return _reason(error)
        return f"its graph deviates from it, first at {first_deviation(self.result.model, self._fresh(), self.inputs)}"

    def _agrees(self, expected: list[Any]) -> bool:
        result = self.result
        result.example = self.inputs
        if "" in result.regions and self.fixed:
            taken = {str(n.target) for n in result.regions[""].graph.nodes if n.op == "placeholder"}
            result.example = self.inputs.without(self.model, self.fixed - taken)
        with rehearsal(result.model, self.origin):
            got = [_call(result.model, result.example) for _ in expected]
        return same(got, expected)

    def _capture_module(self, module: nn.Module, path: str, inputs: Inputs) -> None:
        """Trace one module, turning what fails inside it into islands until the rest goes through."""
        islands = _inside(self.known_islands, path)
        whole = _inside(self.leaves, path)
        fixed = self.fixed if not path else frozenset()
        call = caller(module, inputs.args, inputs.kwargs)
        record_all = False
        while True:
            tracer = ValueTracer({**islands, **whole}, record_all)
            values = copy.deepcopy(bind_inputs(module, inputs.args, inputs.kwargs))
            try:
                with rehearsal(module, self.origin):
                    graph = tracer.trace_call(module, values, call, fixed)
            except Exception as error:
                if isinstance(error, Overwritten) and not record_all:
                    record_all = True
                    continue
                failed = tracer.failed_in or ""
                if failed == "" or failed in islands:
                    self._make_island(module, path, _reason(error), inputs)
                    return
                islands[failed] = _reason(error)
                continue
            break
        self.result.decisions += tracer.decisions.values()
        tracer.keep_constants()
        graph_model = CapturedModel.build(module, graph)
        self._put(path, graph_model)
        called = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "call_module")
        for node in graph.nodes:
            if node.op == "call_module" and str(node.target) in whole:
                set_facts(node, leaf=whole[str(node.target)])
        reached = [name for name in called if name in islands]
        calls = first_calls(module, reached, inputs, self.origin) if reached else {}
        for name in reached:
            self._make_island(module.get_submodule(name), _join(path, name), islands[name], calls.get(name))

    def _make_island(self, module: nn.Module, path: str, reason: str, inputs: Inputs | None) -> None:
        """Let a module run as written, and capture its parts, as far as they are called on the example inputs."""
        self.result.islands[path] = reason
        _log.info("%s runs as written (%s); its parts are captured on their own", path or "the model", reason)
        children = {name: part for name, part in parts(module) if _join(path, name) not in self.leaves}
        inner = [name for name, part in children.items() if not is_single(part)]
        calls = first_calls(module, inner, inputs, self.origin) if inner and inputs is not None else {}
        for name, part in children.items():
            place = _join(path, name)
            if name not in inner:
                self.result.loose.append(place)
            elif place in self.known_islands:
                self._make_island(part, place, self.known_islands[place], calls.get(name))
            elif name in calls:
                self._capture_module(part, place, calls[name])
            else:
                self._make_island(part, place, "not called by itself on the example inputs", None)

    def _module_by_module(self, root: nn.Module, reason: str) -> Capture:
        """The last resort: the whole model runs as written, and its layers are swapped one by one."""
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
    """The example inputs together with the arguments that are fixed, by the names that forward gives them."""
    if not fixed:
        return inputs
    if not isinstance(fixed, Mapping):
        raise ConfigError(f"concrete_args must be a dict of argument names and values, not {fixed!r}")
    known = list(inspect.signature(model.forward).parameters)
    for name in fixed:
        if name not in known:
            raise UnknownNameError(f"{type(model).__name__}.forward has no argument {name!r}{suggest(name, known)}")
    return inputs.with_values(model, fixed)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as torch computes it in training: its fast path for inference rounds in another way."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _first_run(root: nn.Module, inputs: Inputs) -> Any:
    try:
        return root(*inputs.args, **inputs.kwargs)
    except Exception as error:
        raise ConfigError(
            f"{type(root).__name__} does not take the example inputs {inputs}: {type(error).__name__}: {error}"
        ) from error


def _call(model: nn.Module, inputs: Inputs) -> Any:
    values = copy.deepcopy(inputs)
    return model(*values.args, **values.kwargs)


def _reason(error: BaseException) -> str:
    """The first line of an error, and where the user's code met it."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = users_line(last.tb_frame) if last is not None else "?"
    return text if where in text or where == "?" else f"{text} at {where}"


def _inside(paths: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The paths below ``prefix``, as seen from there."""
    start = f"{prefix}." if prefix else ""
    return {p.removeprefix(start): text for p, text in paths.items() if p.startswith(start) and p != prefix}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
