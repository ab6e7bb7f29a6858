"""Records a model's forward as a graph while running it on example inputs."""

import functools
import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bitwright.errors import ConfigError
from bitwright.graph.proxy import IN_PLACE_OPERATORS, ValueProxy, value_of
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.registry import is_custom, qmodule_for
from bitwright.quantizer import TensorQuantizer

# Torch's own composite modules that are traced into; all other torch.nn modules are leaves.
_COMPOSITES = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
# Functions that make tensors from sizes: torch does not let proxies override them, so the trace wraps them.
_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm)
_FACTORIES = (
    *("arange", "zeros", "ones", "full", "empty", "linspace", "eye", "tensor", "as_tensor"),
    *(f.__name__ for f in _RANDOM),
)


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor seen on the example inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Decision:
    """A number Python needed while tracing; the graph holds for inputs that give the same."""

    node: str
    reader: str
    where: str


def check_constant(value: Any, captured: Any, name: str) -> None:
    """Refuse another number, flag or None than the one a model was captured with: its graph relies on it."""
    if isinstance(value, torch.Tensor) or value != captured:
        raise ConfigError(f"the input {name!r} must be {captured!r}, with which the model was captured, not {value!r}")


class ValueTracer(fx.Tracer):
    """An fx tracer whose proxies carry values, and which knows in which module it failed."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: Mapping[str, str]) -> None:
        super().__init__()
        self.leaves = leaves
        self.decisions: list[Decision] = []
        self.failed_in: str | None = None
        self._evaluating = False
        self._scope: list[str] = [""]
        self._inputs: dict[str, Any] = {}
        self._attribute_proxies: dict[str, Any] = {}
        self._paths: dict[nn.Module, str] = {}

    def trace_call(self, root: nn.Module, inputs: Mapping[str, Any], call: Callable[..., Any]) -> fx.Graph:
        """Record ``call(root.forward, **proxies of inputs)``."""
        self.root = root
        self.graph = fx.Graph(tracer_cls=ValueTracer)
        self._paths = {module: name for name, module in root.named_modules()}
        self.tensor_attrs = {
            value: f"{path}.{name}".lstrip(".")
            for path, module in root.named_modules()
            for name, value in module.__dict__.items()
            if isinstance(value, torch.Tensor)
        }
        self._inputs = dict(inputs)
        with self._patched():
            proxies = {name: self._placeholder(name, value) for name, value in inputs.items()}
            try:
                result = call(root.forward, proxies)
            except Exception:
                self.failed_in = "" if self.failed_in is None else self.failed_in
                raise
            self.create_node("output", "output", (self.create_arg(result),), {}, type_expr=None)
        return self.graph

    def _placeholder(self, name: str, value: Any) -> Any:
        proxy = self.create_proxy("placeholder", name, (), {})
        if value is not None and not isinstance(value, bool | int | float | str):
            return proxy
        # Numbers, flags and None are part of the program, not of the data.
        self.create_proxy("call_function", check_constant, (proxy, value, name), {})
        return value

    def create_proxy(  # pyrefly: ignore
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Record a node and compute its value."""
        value = self._evaluate(kind, target, value_of(args), value_of(kwargs))
        node = self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs), _name_for(target))
        node.meta["tensor"] = _info(value)
        node.meta["scope"] = self._scope[-1]
        node.meta["plain"] = isinstance(value, _PLAIN)
        memory = node.meta["memory"] = _memory(value)
        node.meta["shares"] = [n for n in node.all_input_nodes if memory & n.meta.get("memory", _NOTHING)]
        return ValueProxy(node, self, value)

    def create_arg(self, a: Any) -> Any:
        """Turn a proxy into its node before its apparent class can mislead."""
        if issubclass(type(a), ValueProxy):
            return a.node
        if isinstance(a, OrderedDict):  # fx would make a plain dict of it, and of a model's own output class
            arg: Any = self.create_node("call_function", type(a), (super().create_arg(dict(a)),), {})
        else:
            arg = super().create_arg(a)
        if isinstance(arg, fx.Node):
            arg.meta.setdefault("tensor", _info(a))
            arg.meta.setdefault("plain", not isinstance(a, torch.Tensor))
        return arg

    def keep_constants(self) -> None:
        """Set the tensors that forward made, and that the graph reads, as attributes of the root."""
        for value, name in self.tensor_attrs.items():
            if "." not in name and not hasattr(self.root, name):
                setattr(self.root, name, value)

    def _evaluate(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        self._evaluating, before = True, self._evaluating
        try:
            if kind == "placeholder":
                return self._inputs[target]
            if kind == "get_attr":
                return functools.reduce(getattr, target.split("."), self.root)
            if kind == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)
        finally:
            self._evaluating = before

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Leaves: torch's own modules but the composite ones, QModules, and what capture could not enter."""
        if module_qualified_name in self.leaves or isinstance(m, TensorQuantizer | QuantInputMixin):
            return True
        if is_custom(qmodule_for(type(m))):  # the user's own module, with a QModule registered for it
            return True
        return type(m).__module__.startswith("torch.nn") and not isinstance(m, _COMPOSITES)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a leaf, or run the module's forward and note where it fails."""
        if self._evaluating or m is self.root or m not in self._paths:
            return forward(*args, **kwargs)
        path = self._paths[m]
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        self._scope.append(path)
        try:
            return forward(*args, **kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = path
            raise
        finally:
            self._scope.pop()

    def note_decision(self, node: fx.Node, reader: str) -> None:
        """Remember that the trace used a number of the example inputs."""
        frame = next(
            (f for f in reversed(traceback.extract_stack(limit=8)) if "/bitwright/graph/" not in f.filename),
            None,
        )
        where = f"{frame.filename}:{frame.lineno}" if frame else "?"
        self.decisions.append(Decision(node.name, reader, where))

    def _attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        if self._evaluating or module not in self._paths:
            return value
        path = self._paths[module]
        target = f"{path}.{name}" if path else name
        if target not in self._attribute_proxies:
            self._attribute_proxies[target] = self.create_proxy("get_attr", target, (), {})
        return self._attribute_proxies[target]

    @contextmanager
    def _patched(self) -> Iterator[None]:
        tracer, own_call, own_getattr = self, nn.Module.__call__, nn.Module.__getattr__

        @functools.wraps(own_call)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tracer.call_module(module, functools.partial(own_call, module), args, kwargs)

        @functools.wraps(own_getattr)
        def getattribute(module: nn.Module, name: str) -> Any:
            value = own_getattr(module, name)
            return tracer._attribute(module, name, value) if isinstance(value, torch.Tensor) else value

        factories = {name: getattr(torch, name) for name in _FACTORIES}
        try:
            nn.Module.__call__, nn.Module.__getattr__ = call, getattribute  # pyrefly: ignore
            for name, factory in factories.items():
                setattr(torch, name, self._wrap_factory(factory))
            yield
        finally:
            nn.Module.__call__, nn.Module.__getattr__ = own_call, own_getattr  # pyrefly: ignore
            for name, factory in factories.items():
                setattr(torch, name, factory)

    def _wrap_factory(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if not self._evaluating and (factory in _RANDOM or _holds_proxy((args, kwargs))):
                return self.create_proxy("call_function", factory, args, kwargs)
            return factory(*args, **kwargs)

        return make


def _holds_proxy(item: Any) -> bool:
    if issubclass(type(item), ValueProxy):
        return True
    if isinstance(item, tuple | list):
        return any(_holds_proxy(i) for i in item)
    return isinstance(item, dict) and any(_holds_proxy(i) for i in item.values())


def _name_for(target: Any) -> str | None:
    """The name of a node where fx would choose badly; None leaves it to fx."""
    if target in IN_PLACE_OPERATORS:
        return IN_PLACE_OPERATORS[target].__name__
    # Modules are named after nodes: that of ``x.half()`` must not shadow ``nn.Module.half``.
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"{name}_value" if hasattr(nn.Module, name) else None


_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)
_NOTHING: frozenset[int] = frozenset()


def _memory(value: Any) -> frozenset[int]:
    """Where in memory a tensor, or several in a sequence, lie: by this a view is known from a new tensor."""
    if isinstance(value, torch.Tensor):
        return frozenset({value.untyped_storage().data_ptr()} - {0})
    if isinstance(value, tuple | list):
        return _NOTHING.union(*(_memory(item) for item in value))
    return _NOTHING


def _info(value: Any) -> TensorInfo | None:
    return TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the example inputs as ``model.forward`` does; of ``*args``, the first is called ``args_0``."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}_{i}": v for i, v in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def caller(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that calls a forward with named values, laid out as ``args`` and ``kwargs`` are."""
    names = list(bind_inputs(model, args, kwargs))
    positional, keyword = names[: len(args)], names[len(args) :]

    def call(forward: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        return forward(*(values[n] for n in positional), **{n: values[n] for n in keyword})

    return call
