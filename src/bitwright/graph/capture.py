"""Capture: from a model and example inputs to a graph, or to several graphs around what cannot be traced.

A module whose Python cannot be traced becomes an *island*: it runs as written, and its children are captured
on their own, down to single modules. So capture never fails; what happened is on record.
"""

import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from bitwright.errors import CaptureError, ConfigError
from bitwright.graph.model import CapturedModel
from bitwright.graph.tracer import Decision, ValueTracer, bind_inputs, caller

_log = logging.getLogger(__name__)


@dataclass
class Inputs:
    """Example inputs as a call: positional and keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> "Inputs":
        """Read a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
        if isinstance(example, Inputs):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, tuple | list):
            return cls(tuple(example))
        return cls((example,))

    def __str__(self) -> str:
        parts = [_describe(a) for a in self.args] + [f"{k}={_describe(v)}" for k, v in self.kwargs.items()]
        return "(" + ", ".join(parts) + ")"


@dataclass
class Capture:
    """What capture made of a model.

    Attributes:
        model: the result: a CapturedModel, or the user's own class where the root is an island.
        regions: every graph in it, by the qualified name of the module it stands for ("" is the whole model).
        loose: modules that stand outside of any graph, to be swapped one by one.
        islands: modules that run as written, with the reason.
        decisions: numbers of the example inputs that the graphs rely on.
    """

    model: nn.Module
    regions: dict[str, CapturedModel] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    islands: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)


def capture(model: nn.Module, example_inputs: Any) -> Capture:
    """Capture ``model`` as it computes on ``example_inputs``; the model itself is left untouched."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    inputs = Inputs.of(example_inputs)
    root = _copy(model).eval()
    with torch.no_grad():
        with _rehearsal(root):
            expected = _run(root, copy.deepcopy(inputs))
        try:
            result = Capture(root)
            _capture_module(root, "", inputs, result)
            got = _run_captured(result.model, inputs)
        except Exception as error:
            result = _module_by_module(_copy(model).eval(), _reason(error))
            got = _run_captured(result.model, inputs)
        if not _same(got, expected):
            raise CaptureError(
                f"the captured {type(root).__name__} does not compute what the original does on the example inputs; "
                f"the first node that deviates is {_first_deviation(result.model, root, inputs)}"
            )
    return result


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy, also of models that keep results of computation, as ``torch.nn.utils.weight_norm`` does."""
    try:
        return copy.deepcopy(model)
    except RuntimeError:
        kept = [v for m in model.modules() for v in m.__dict__.values() if isinstance(v, torch.Tensor)]
        return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept if not v.is_leaf})


@contextmanager
def _rehearsal(model: nn.Module) -> Iterator[None]:
    """Run a model as if it had not been run: always the same random numbers, and its state is put back."""
    kinds = ("_modules", "_parameters", "_buffers")
    before = [(m, {**m.__dict__, **{k: m.__dict__[k].copy() for k in kinds}}) for m in model.modules()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, state in before:
                module.__dict__.clear()
                module.__dict__.update(state)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _run(root: nn.Module, inputs: Inputs) -> Any:
    try:
        return root(*inputs.args, **inputs.kwargs)
    except Exception as error:
        raise ConfigError(
            f"{type(root).__name__} does not take the example inputs {inputs}: {type(error).__name__}: {error}"
        ) from error


def _capture_module(module: nn.Module, path: str, inputs: Inputs, result: Capture) -> None:
    """Trace one module, turning what fails inside it into islands until the rest goes through."""
    leaves: dict[str, str] = {}
    call = caller(module, inputs.args, inputs.kwargs)
    while True:
        tracer = ValueTracer(leaves)
        values = copy.deepcopy(bind_inputs(module, inputs.args, inputs.kwargs))
        try:
            with _rehearsal(module):
                graph = tracer.trace_call(module, values, call)
        except Exception as error:
            failed = tracer.failed_in or ""
            reason = _reason(error)
            if failed == "" or failed in leaves:
                _make_island(module, path, reason, inputs, result)
                return
            leaves[failed] = reason
            continue
        break
    result.decisions += tracer.decisions
    tracer.keep_constants()
    graph_model = CapturedModel.build(module, graph)
    result.regions[path] = graph_model
    _put(result, path, graph_model)
    called = [str(n.target) for n in graph.nodes if n.op == "call_module" and str(n.target) in leaves]
    calls = _first_calls(module, called, inputs) if called else {}
    for name in dict.fromkeys(called):
        _make_island(module.get_submodule(name), _join(path, name), leaves[name], calls.get(name), result)


def _make_island(module: nn.Module, path: str, reason: str, inputs: Inputs | None, result: Capture) -> None:
    """Let a module run as written, and capture its parts, as far as they are called on the example inputs."""
    result.islands[path] = reason
    _log.info("%s runs as written (%s); its parts are captured on their own", path or "the model", reason)
    parts = dict(_parts(module))
    inner = [name for name, part in parts.items() if not _is_single(part)]
    calls = _first_calls(module, inner, inputs) if inner and inputs is not None else {}
    for name, part in parts.items():
        if name not in inner:
            result.loose.append(_join(path, name))
        elif name in calls:
            _capture_module(part, _join(path, name), calls[name], result)
        else:
            _make_island(part, _join(path, name), "not called by itself on the example inputs", None, result)


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, and in the place of a ModuleList or ModuleDict the members of it."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _is_single(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def _first_calls(module: nn.Module, names: list[str], inputs: Inputs) -> dict[str, Inputs]:
    """Run ``module`` and return, for each of its submodules ``names``, the arguments of its first call."""
    seen: dict[str, Inputs] = {}

    def look_at(name: str) -> RemovableHandle:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = copy.deepcopy(Inputs(args, kwargs))

        return module.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True)

    handles = [look_at(name) for name in names]
    try:
        values = copy.deepcopy(inputs)
        with _rehearsal(module):
            module(*values.args, **values.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _module_by_module(root: nn.Module, reason: str) -> Capture:
    """The last resort: the whole model runs as written, and its layers are swapped one by one."""
    loose = [path for path, module in root.named_modules() if path and _is_single(module)]
    return Capture(root, loose=loose, islands={"": reason})


def _put(result: Capture, path: str, module: nn.Module) -> None:
    if path:
        result.model.set_submodule(path, module)
    else:
        result.model = module


def _run_captured(model: nn.Module, inputs: Inputs) -> Any:
    values = copy.deepcopy(inputs)
    with _rehearsal(model):
        return model(*values.args, **values.kwargs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b) or _equal_with_nan(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return type(a) is type(b) and (a == b or a != a)


def _equal_with_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _first_deviation(captured: nn.Module, root: nn.Module, inputs: Inputs) -> str:
    if not isinstance(captured, CapturedModel):
        return "inside an island"
    seen: dict[str, list[Any]] = {}
    handles = [
        m.register_forward_hook(lambda _m, _a, out, path=path: seen.setdefault(path, []).append(copy.deepcopy(out)))
        for path, m in root.named_modules()
        if path
    ]
    try:
        values = copy.deepcopy(inputs)
        root(*values.args, **values.kwargs)
    finally:
        for handle in handles:
            handle.remove()

    class Compare(fx.Interpreter):
        first = ""

        def run_node(self, n: fx.Node) -> Any:
            out = super().run_node(n)
            calls = seen.get(str(n.target)) if n.op == "call_module" else None
            if calls and not self.first and not _same(out, calls.pop(0)):
                self.first = f"{n.name!r} ({n.target})"
            return out

    compare = Compare(captured)
    values = copy.deepcopy(inputs)
    compare.run(*bind_inputs(root, values.args, values.kwargs).values())
    return compare.first or "a function between modules"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, Mapping | tuple | list) else repr(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
