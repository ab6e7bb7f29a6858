"""Everything that relies on torch's internals: one small function per use, and a self-test for all of them.

Nothing else in the package uses a private name of torch (``nn.Module._modules``, ``_parameters`` and ``_buffers``
excepted). ``python -m bitwright.torch_internals`` says what works with the installed torch and what does not.
"""

import functools
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

TRIED = ("2.9", "2.13")
"""The versions of torch with which the self-test passed; the tests ran with 2.13 only."""

MODULE_STATE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
"""The attributes in which a module keeps its state: dicts by name, and a set of names."""

COMPILED_CALL = "_compiled_call_impl"
"""Where a module keeps what ``module.compile()`` made."""

HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))
"""The attributes in which a module keeps its hooks."""

_PRODUCTS = (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
GROUPED_PRODUCTS = tuple(function for function in _PRODUCTS if function is not None)
"""What multiplies groups of rows with a matrix each, by its public name and by the one before."""

_IN_EVERY_MODULE = frozenset(vars(nn.Module()))

_CHECKS: dict[str, Callable[[], bool]] = {}


def _check(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make a function part of the self-test; its docstring is the name of what it tries."""
    _CHECKS[(function.__doc__ or function.__name__).rstrip(".")] = function
    return function


def self_test() -> dict[str, str]:
    """Test everything that Bitwright expects of torch's internals.

    Returns:
        The failed expectations, each with the error; empty if this torch fits.
    """
    failures: dict[str, str] = {}
    for name, check in _CHECKS.items():
        try:
            if not check():
                failures[name] = "it behaves differently"
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


def find_attribute(path: str) -> tuple[Any, str] | None:
    """The owner and the name of ``torch.utils.checkpoint.checkpoint``, say; None if this torch does not have it."""
    first, *between, name = path.split(".")
    try:
        owner = functools.reduce(getattr, between, importlib.import_module(first))
    except AttributeError:
        return None
    return (owner, name) if name in vars(owner) else None


# ------------------------------------------------------------------------------------------------- tensors


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to. Leans on ``Tensor._version``."""
    return tensor._version


def decomposed_quantizers() -> Any:  # noqa: ANN401
    """Torch's quantizers as operators, which inductor joins with integer kernels; inductor defines them."""
    importlib.import_module("torch._inductor.decomposition")
    return torch.ops.quantized_decomposed


def frozen_weights(note: Callable[[fx.Graph], None]) -> Any:  # noqa: ANN401
    """Temporarily make inductor treat weights as constants, as its integer kernels need, and look at its graphs."""
    config = importlib.import_module("torch._inductor.config")
    return config.patch(freezing=True, post_grad_custom_post_pass=note)


@_check
def _version() -> bool:
    """Tensor._version counts writes, through views as well."""
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor[0].add_(1)
    return version_of(tensor) == before + 1


# ------------------------------------------------------------------------------------------------- modules


def users_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module, except those that torch gives every module, such as parameters and hooks."""
    return [(name, value) for name, value in vars(module).items() if name not in _IN_EVERY_MODULE]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks. Leans on ``nn.Module._forward_hooks`` and ``_forward_pre_hooks``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def remove_pre_hook(module: nn.Module, hook: Callable[..., object]) -> bool:
    """Remove a forward pre-hook, and say whether it was there. Leans on ``nn.Module._forward_pre_hooks``."""
    found = [key for key, value in module._forward_pre_hooks.items() if value is hook]
    for key in found:
        del module._forward_pre_hooks[key]
    return bool(found)


def pre_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The forward pre-hooks of a module. Leans on ``nn.Module._forward_pre_hooks``."""
    return list(module._forward_pre_hooks.values())


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a state dict has the buffer of that name. Leans on ``nn.Module._non_persistent_buffers_set``."""
    return buffer in module._buffers and buffer not in module._non_persistent_buffers_set


@_check
def _module_state() -> bool:
    """nn.Module keeps state and hooks in the attributes known here."""
    return all(name in vars(nn.Module()) for name in MODULE_STATE) and len(HOOKS) >= 10


@_check
def _buffers() -> bool:
    """nn.Module._non_persistent_buffers_set has the buffers that are not saved."""
    module = nn.Module()
    for name, saved in {"saved": True, "unsaved": False}.items():
        module.register_buffer(name, torch.zeros(1), persistent=saved)
    return [name for name in module._buffers if is_saved(module, name)] == ["saved"] == list(module.state_dict())


@_check
def _hooks() -> bool:
    """nn.Module._forward_pre_hooks and _forward_hooks hold the hooks that run."""
    module, ran = nn.Identity(), []
    module.register_forward_pre_hook(hook := lambda *_: ran.append("before"))
    module.register_forward_hook(lambda *_: ran.append("after"))
    module(torch.zeros(1))
    removed = remove_pre_hook(module, hook)
    module(torch.zeros(1))
    return removed and has_hooks(module) and ran == ["before", "after", "after"] and not has_hooks(nn.Identity())


@_check
def _module_calls() -> bool:
    """nn.Module.__call__, __getattr__ and __setattr__ can be replaced on the class."""
    return all(find_attribute(f"torch.nn.Module.{name}") for name in ("__call__", "__getattr__", "__setattr__"))


# ---------------------------------------------------------------------------- contexts and checkpointing

NON_REENTRANT_CHECKPOINT = "torch.utils.checkpoint._checkpoint_without_reentrant_generator"
"""The generator that wraps a function under ``checkpoint(use_reentrant=False)``, to keep what backward needs."""

CHECK, CHECK_TENSOR = "torch._check_with", "torch._check_tensor_all_with"
"""What ``torch._check`` and its like call with an error's type, a truth (or a tensor of truths) and a message."""


def is_enabled(context: torch.autocast) -> bool:
    """Whether an autocast context changes anything. Leans on ``torch.autocast._enabled``."""
    return context._enabled


@_check
def _autocast() -> bool:
    """torch.autocast._enabled says whether the context does anything."""
    contexts = [torch.autocast("cpu", enabled=enabled) for enabled in (True, False)]
    return [is_enabled(context) for context in contexts] == [True, False]


@_check
def _checkpoint() -> bool:
    """torch.utils.checkpoint wraps functions by a generator."""
    return (found := find_attribute(NON_REENTRANT_CHECKPOINT)) is not None and callable(getattr(*found))


@_check
def _truths() -> bool:
    """torch._check and torch._check_tensor_all leave their work to one function each."""
    found = [getattr(*owner) for path in (CHECK, CHECK_TENSOR) if (owner := find_attribute(path)) is not None]
    return [list(inspect.signature(f).parameters) for f in found] == [["error_type", "cond", "message"]] * 2


# ------------------------------------------------------------------------------------------ torch.compile


def compiled_original(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile`` made this one from; None for any other module.

    Leans on ``torch._dynamo.eval_frame.OptimizedModule``, which is loaded if anything was compiled.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return module._orig_mod if frames is not None and isinstance(module, frames.OptimizedModule) else None


def settle_compiler() -> bool:
    """Make torch.compile look up the functions of torch and Python now, before they are temporarily replaced.

    It does so once, when it first compiles. Leans on the tables of ``torch._dynamo.trace_rules``.

    Returns:
        Whether torch.compile is loaded; if not, nothing needs to be done yet.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map()
        rules._builtin_function_ids()
    return rules is not None


def refresh_compiler() -> None:
    """Make torch.compile look functions up again if it was loaded while they were replaced. Leans on these tables."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()
        rules._builtin_function_ids.add(id(isinstance))


@_check
def _compiled() -> bool:
    """torch.compile has the module whose class wraps compiled modules."""
    return importlib.util.find_spec("torch._dynamo.eval_frame") is not None


# ------------------------------------------------------------------------------------------ torch.export


def is_traced(x: Tensor) -> bool:
    """Whether ``torch.compile`` or ``torch.export`` is tracing the call that receives ``x``.

    ``torch.compiler.is_compiling`` is also True in other threads meanwhile; their tensors are plain ones.
    """
    compiler = torch.compiler
    return compiler.is_compiling() and (compiler.is_dynamo_compiling() or type(x) not in (Tensor, nn.Parameter))


def is_exported(x: Tensor) -> bool:
    """Whether ``torch.export`` is tracing the call that receives ``x``."""
    return torch.compiler.is_exporting() and is_traced(x)


EXPORT_TRACE = "torch.export._trace"
"""The module that prints what it has of a graph when ``torch.export`` fails."""


def mute_failed_graphs(muted: Callable[[], bool]) -> None:
    """Make ``torch.export`` print the graph of a failure only while ``muted()`` is False.

    Leans on ``torch.export._trace``, where a function named ``print`` takes the place of Python's own.
    """
    module: Any = importlib.import_module(EXPORT_TRACE)
    module.print = lambda *args, **options: None if muted() else print(*args, **options)  # noqa: T201


@_check
def _export_trace() -> bool:
    """torch.export traces in a module of its own."""
    return importlib.util.find_spec(EXPORT_TRACE) is not None


ONNX_FUNCTIONS = "torch.onnx._internal._lazy_import.onnxscript_apis"
"""The module that tells ``torch.onnx`` how onnxscript writes the operators of torch."""


def keep_onnx_functions(kept: Callable[[], bool]) -> None:
    """Make exports for which ``kept()`` is True share one table of ONNX functions, which takes 1/3 s to build.

    Leans on ``get_torchlib_ops`` of the module that :data:`ONNX_FUNCTIONS` names.
    """
    found = find_attribute(ONNX_FUNCTIONS)
    if found is None:
        return
    module: Any = importlib.import_module(getattr(*found).__name__)
    make = getattr(module, "get_torchlib_ops", None)
    if make is None or hasattr(make, "__wrapped__"):
        return
    once = functools.cache(make)
    module.get_torchlib_ops = functools.wraps(make)(lambda: once() if kept() else make())


@_check
def _onnx_functions() -> bool:
    """torch.onnx asks a module of onnxscript for its functions."""
    importlib.import_module("torch.onnx._internal._lazy_import")
    return find_attribute(ONNX_FUNCTIONS) is not None


# ----------------------------------------------------------------------------------------------- torch.fx


has_side_effect = fx.has_side_effect
"""Keeps calls of a function in a graph although nobody reads their result. Leans on an undocumented name of fx."""


@contextmanager
def watching_operators(look: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Show ``look`` every operator that this thread calls, with its arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Callable[..., Any],
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> object:
            look(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watching():
        yield


@_check
def _side_effect() -> bool:
    """fx.has_side_effect keeps a call from dead code elimination."""
    graph = fx.Graph()
    graph.call_function(has_side_effect(_checked))
    graph.output(None)
    graph.eliminate_dead_code()
    return any(node.target is _checked for node in graph.nodes)


def _checked() -> None:
    """Do nothing, in a graph."""


@_check
def _proxies() -> bool:
    """fx.Proxy needs only a node and a tracer, and asks its tracer for every torch function and operator."""

    class Recording(fx.Tracer):
        def create_proxy(self, *args: object, **options: object) -> None:  # pyrefly: ignore
            seen.append(args[:2])

    seen: list[object] = []
    tracer = Recording()
    tracer.graph = fx.Graph()
    proxy: Any = object.__new__(fx.Proxy)
    proxy.__dict__.update(node=tracer.graph.placeholder("x"), tracer=tracer)
    _ = torch.relu(proxy), proxy + 1
    return seen == [("call_function", torch.relu), ("call_function", operator.add)]


@_check
def _tracer() -> bool:
    """fx.Tracer names constants and turns containers of nodes into arguments."""
    tracer = fx.Tracer()
    tracer.root, tracer.graph = nn.Module(), fx.Graph()
    proxy = fx.Proxy(tracer.graph.placeholder("x"), tracer)
    fresh = tracer.get_fresh_qualname("_tensor_constant")
    argument: Any = tracer.create_arg({"a": [slice(proxy)]})
    return fresh == "_tensor_constant0" and argument["a"][0].stop is proxy.node


@_check
def _operators_watched() -> bool:
    """A TorchDispatchMode sees the operators that a torch function is made of."""
    seen, x = list[object](), torch.zeros(1, 1, 2, 2)
    with torch.no_grad(), watching_operators(lambda operator, *_: seen.append(operator)):
        nn.functional.max_pool2d(x, 2)
    return seen == [torch.ops.aten.max_pool2d_with_indices.default]


@_check
def _graph_module() -> bool:
    """Every fx.GraphModule has a class of its own, on which forward is set, and which may have more bases."""

    class Mixed(fx.GraphModule, nn.Identity):
        pass

    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    one, other = (Mixed(nn.Module(), graph) for _ in range(2))
    return type(one) is not type(other) and "forward" in vars(type(one)) and float(one(torch.ones(()))) == -1


if __name__ == "__main__":
    found = self_test()
    for name in _CHECKS:
        sys.stdout.write(f"FAILS  {name}: {found[name]}\n" if name in found else f"holds  {name}\n")
    sys.stdout.write(f"torch {torch.__version__}; tried with {', '.join(TRIED)}\n")
    raise SystemExit(bool(found))
