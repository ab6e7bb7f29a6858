"""Records a model's forward as a graph while running it on example inputs."""

import enum
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.capture.failures import Overwritten, Untraceable, call_model, our_place, users_line
from bitwright.graph.capture.guards import Guard, check_data, check_input, check_truth, check_value
from bitwright.graph.capture.keepers import forget_proxies, keepers_named_in
from bitwright.graph.capture.nesting import LITERALS, holds_proxy, plain_tensors, tensors_in
from bitwright.graph.capture.objects import ConstantObject, construction_of
from bitwright.graph.capture.patches import recording
from bitwright.graph.capture.proxy import IN_PLACE_OPERATORS, ValueProxy, value_of
from bitwright.graph.facts import copy_facts, facts, has_facts, set_facts, set_value, tensor_info
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.registry import is_custom, qmodule_for, torch_base
from bitwright.quantizer import TensorQuantizer
from bitwright.torch_internals import has_side_effect, users_attributes, version_of

_CONTAINERS = (slice, tuple, list, range)
_MAY_GIVE_NONE = ("get", "pop", getattr, operator.getitem)  # or something else, with other inputs
# Torch's own composite modules that are traced into; all other torch.nn modules are leaves.
_COMPOSITES = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


class ValueTracer(fx.Tracer):
    """An fx tracer whose proxies carry values, and that knows in which module it failed."""

    def __init__(self, leaves: Mapping[str, str], record_all: bool = False, filled: Collection[str] = ()) -> None:
        super().__init__()
        self.leaves = leaves
        self.filled = filled  # attributes that are containers, and that forward changes
        self.record_all = record_all  # also tensors created from plain numbers
        self.guards: dict[tuple[fx.Node, str], Guard] = {}
        self.failed_in: str | None = None
        self.evaluating = False
        self._failure: Exception | None = None  # the first, even if the user's code catches it and continues
        self._scope: list[str] = [""]
        self._inputs: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}
        self._written: dict[str, ValueProxy] = {}
        self._modules: dict[str, nn.Module] = {}
        self._paths: dict[nn.Module, str] = {}
        self._names: dict[int, str] = {}
        self._buffers: set[str] = set()
        self._keepers: set[Any] = set()
        self._memory: dict[fx.Node, frozenset[int]] = {}
        self._containers: dict[fx.Node, Any] = {}

    def trace_call(
        self, root: nn.Module, inputs: Mapping[str, Any], call: Callable[..., Any], fixed: Collection[str] = ()
    ) -> fx.Graph:
        """Record ``call(root.forward, proxies of inputs)``; inputs that are ``fixed`` are part of the program."""
        self.root = root
        self.graph = fx.Graph()
        self._look_at_modules()
        self._inputs = dict(inputs)
        with self._forgotten(), recording(self), torch.enable_grad():
            proxies = {name: self._placeholder(name, value, fixed) for name, value in inputs.items()}
            result = call(root.forward, proxies)
            if self._failure is not None:  # and the user's code continued regardless
                raise self._failure
            arg = self.create_arg(result)
            for target, value in self._written.items():
                set_facts(self.create_node("call_function", store, (self._get(target), value.node), {}), plain=True)
            self.create_node("output", "output", (arg,), {}, type_expr=None)
        stop_gradients(self.graph)
        return self.graph

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        """Leave no proxies behind in functions that keep results."""
        try:
            yield
        finally:
            forget_proxies(self._keepers)

    def meets_keepers(self, frame: FrameType) -> bool:
        """Whether a frame may be calling a function that keeps results, which is noted."""
        found = keepers_named_in(frame)
        self._keepers.update(found)
        return bool(found)

    def _look_at_modules(self) -> None:
        """Map every tensor of the model to its name; those that are plain attributes temporarily become buffers."""
        self._modules = dict(self.root.named_modules())
        self._paths = {module: name for name, module in self._modules.items()}
        self.tensor_attrs = {}
        for module, path in self._paths.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            start = f"{path}." if path else ""
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                self._names.setdefault(id(value), start + name)
            self._buffers.update(start + name for name in module._buffers)
            for name, value in users_attributes(module):
                if isinstance(value, torch.Tensor):
                    self.tensor_attrs[value] = start + name
                elif start + name not in self.filled:
                    continue
                module._buffers[name] = module.__dict__.pop(name)  # until the end of the trial run: reads are seen

    def _placeholder(self, name: str, value: object, fixed: Collection[str]) -> Any:
        plain = value is None or isinstance(value, bool | int | float | str)
        if name in fixed and not plain:
            return value
        names = list(self._inputs)
        last = all(_is_fixed(self._inputs[n], n in fixed) for n in names[names.index(name) :])
        if name in fixed and not last:
            return value  # a parameter with a default cannot stand before one without
        if not plain:
            return self.create_proxy("placeholder", name, (), {})
        # Numbers, flags and None are part of the program, not of the data.
        node = self.create_node("placeholder", name, (value,) if last else (), {})
        set_facts(node, plain=True)
        self._check(check_input, (node, value, name))
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
        if getattr(target, "__module__", None) == "_operator":  # torch cannot compute with a symbolic truth
            args = tuple(bool(a) if type(a) is ValueProxy and type(value_of(a)) is bool else a for a in args)
            if not holds_proxy(args):
                return call_model(target, *args)
        try:
            return self._record(kind, target, args, kwargs)
        except Exception as error:
            if self._failure is None and our_place(error):
                self._failure = error
            raise

    def _record(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        constants = [(t, version_of(t)) for t in plain_tensors((args, kwargs))]
        value = self._evaluate(kind, target, value_of(args), value_of(kwargs))
        if any(version_of(t) != version for t, version in constants):
            raise self.refuse(
                f"{_title(target)} writes data into a tensor that is a constant of the trace", Overwritten
            )
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise self.refuse("a nested tensor cannot be recorded")
        node = self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs), _name_for(target))
        shares = self._sharing(node, value)
        set_value(node, value, scope=self._scope[-1], grad=torch.is_grad_enabled(), shares=shares)
        proxy = ValueProxy(node, self, value)
        if value is None:
            if target in _MAY_GIVE_NONE:
                self.guard(proxy, "what was read", check_value, None)
            return None
        if type(value) is str:  # Python needs real strings almost everywhere
            self.guard(proxy, "the text", check_value, value)
            return value
        return proxy

    def create_arg(self, a: Any) -> Any:
        """Turn a proxy into its node before its apparent class misleads fx, and any object into a constant."""
        kind = type(a)
        if kind is ValueProxy:
            return a.node
        if kind is tuple or kind is list:
            return kind([self.create_arg(item) for item in a])
        if kind in LITERALS:
            return a
        if kind is dict and all(type(key) is str for key in a):
            return {key: self.create_arg(item) for key, item in a.items()}
        if isinstance(a, torch.Tensor):
            return self._constant(a)
        arg = self._container(a) if isinstance(a, _CONTAINERS) or kind is dict else self._object(a)
        if type(arg) is fx.Node and not has_facts(arg):
            set_facts(arg, plain=True)
        return arg

    def _container(self, a: object) -> Any:
        try:
            return super().create_arg(a)
        except (NotImplementedError, RuntimeError) as error:  # what fx refuses, such as a dict with proxies as keys
            raise self.refuse(f"a {type(a).__qualname__} cannot be recorded ({error})") from error

    def _object(self, a: object) -> fx.Node:
        if isinstance(a, nn.Module) and a in self._paths:
            return self.create_node("get_attr", self._paths[a], (), {})
        if isinstance(a, enum.Enum) or not holds_proxy(a):
            return self.create_node("call_function", ConstantObject(a), (), {})
        how = None if isinstance(a, nn.Module) or self.evaluating else construction_of(a)
        if how is None:
            raise self.refuse(f"a {type(a).__qualname__} that holds tensors cannot be recorded")
        function, args, kwargs = how
        return self.create_node("call_function", function, self.create_arg(args), self.create_arg(kwargs))

    def _constant(self, value: torch.Tensor) -> fx.Node:
        if value.grad_fn is not None:
            raise self.refuse("a parameter was read without being traced")
        name = self._names.get(id(value))
        if name is None:
            name = self.tensor_attrs.get(value)
        if name is None:
            name = self.tensor_attrs[value] = self.get_fresh_qualname("_tensor_constant")
            setattr(self.root, name, value)
        return self._get(name, value)

    def _get(self, target: str, value: torch.Tensor | None = None) -> fx.Node:
        node = self.create_node("get_attr", target, (), {})
        set_facts(node, tensor=tensor_info(value))
        self._memory[node] = _memory(value)
        return node

    def _sharing(self, node: fx.Node, value: object) -> tuple[fx.Node, ...]:
        """The inputs of a node that share memory with its value."""
        memory = self._memory[node] = _memory(value)
        if value is None:  # what fills a container shares memory with it
            memory = memory.union(*(_memory(self._containers.get(n)) for n in node.all_input_nodes))
        elif not isinstance(value, torch.Tensor | tuple):
            self._containers[node] = value
        return tuple(n for n in node.all_input_nodes if memory & self._memory_of(n))

    def _memory_of(self, node: fx.Node) -> frozenset[int]:
        """Where the tensors of a node's value lie; those of a container as it is now."""
        return self._memory.get(node, _NOTHING).union(_memory(self._containers.get(node)))

    def keep_constants(self) -> None:
        """Store the tensors that forward created and the graph reads as attributes of the root."""
        for value, name in self.tensor_attrs.items():
            if "." not in name and not hasattr(self.root, name):
                setattr(self.root, name, value)

    def _evaluate(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        self.evaluating, before = True, self.evaluating
        try:
            with torch.no_grad():
                if kind == "placeholder":
                    return self._inputs[target]
                if kind == "get_attr":
                    return functools.reduce(getattr, target.split("."), self.root)
                if kind == "call_module":
                    return call_model(self._modules[target], *args, **kwargs)
                if kind == "call_method":
                    return call_model(call_model(getattr, args[0], target), *args[1:], **kwargs)
                return call_model(target, *args, **kwargs)
        finally:
            self.evaluating = before

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Leaves are torch's own modules (except composite ones), QModules, and what capture could not enter."""
        if module_qualified_name in self.leaves or isinstance(m, TensorQuantizer | QuantInputMixin):
            return True
        if isinstance(m, torch.jit.ScriptModule):
            return True
        if is_custom(qmodule_for(type(m))):  # the user's own module, with a QModule registered for it
            return True
        return torch_base(type(m)).__module__.startswith("torch.nn") and not isinstance(m, _COMPOSITES)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a leaf, or run the module's forward and note where it fails."""
        if self.evaluating or m is self.root or m not in self._paths:
            return call_model(forward, *args, **kwargs)
        path = self._paths[m]
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        self._scope.append(path)
        try:
            return call_model(forward, *args, **kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = path
            raise
        finally:
            self._scope.pop()

    def refuse(self, message: str, kind: type[Untraceable] = Untraceable) -> Exception:
        """The error for what cannot be recorded; the user's code may catch it, but the trace remembers it."""
        if self._failure is None:
            self._failure = kind(f"{message} at {users_line()}")
            self.failed_in = self._scope[-1]
        return self._failure

    def guard(self, proxy: ValueProxy, reader: str, check: Callable[..., None], value: object) -> None:
        """Remember that the trace relies on a number from the example inputs, and make the graph check it."""
        if self.evaluating or (proxy.node, reader) in self.guards:
            return
        if type(value) is bool:
            check = check_truth
        where = users_line()
        shown = value if type(value) in (bool, int, float, str) else repr(value)
        self.guards[proxy.node, reader] = Guard(proxy.node.name, reader, where, shown)
        self._check(check, (proxy.node, value, reader, where, self._scope[-1]))

    def check_data(self, holds: ValueProxy) -> None:
        """Record a check of data that the model makes, which decides nothing."""
        self._check(check_data, (holds.node, users_line()))

    def _check(self, check: Callable[..., None], args: tuple[Any, ...]) -> None:
        node = self.create_node("call_function", check, args, {})
        set_facts(node, plain=True, scope=self._scope[-1])

    def read_attribute(self, module: nn.Module, name: str, value: object) -> Any:
        """Return a proxy for a parameter, a buffer, or a container that forward changes."""
        if module not in self._paths or type(value) is ValueProxy:
            return value
        path = self._paths[module]
        target = f"{path}.{name}" if path else name
        if target not in self._attributes:
            proxy = self._attributes[target] = self.create_proxy("get_attr", target, (), {})
            if target in self.filled:
                set_facts(proxy.node, written=True)
        return self._attributes[target]

    def write_attribute(self, module: nn.Module, name: str, value: ValueProxy) -> None:
        """Note that forward sets a buffer to another value, which the graph stores at the end."""
        path = self._paths.get(module)
        if path is None or not isinstance(value, torch.Tensor):
            return
        target = f"{path}.{name}" if path else name
        if target in self._buffers:
            self._written[target] = value


@has_side_effect
def store(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Set a buffer to another value, with another shape if necessary."""
    with torch.no_grad():
        if buffer is value:
            return
        if buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
        else:
            buffer.data = value.detach()


def stop_gradients(graph: fx.Graph) -> None:
    """Block gradients through what was computed in a ``no_grad`` block: detach what is read outside it."""
    for node in list(graph.nodes):
        info = facts(node).tensor
        if facts(node).grad or node.op in ("placeholder", "get_attr"):
            continue
        if info is None:  # several tensors: their items were also computed in the block
            for user in node.users:
                if user.target is operator.getitem:
                    set_facts(user, grad=False)
        elif info.dtype.is_floating_point and any(facts(user).grad for user in node.users):
            _detach(node)


def _detach(node: fx.Node) -> None:
    """Make readers of a node outside its ``no_grad`` block read it detached."""
    outside = [user for user in node.users if facts(user).grad]
    with node.graph.inserting_after(node):
        detached = node.graph.call_method("detach", (node,))
    copy_facts(node, detached)
    set_facts(detached, grad=True, shares=(node,))
    for user in outside:
        user.replace_input_with(node, detached)
        set_facts(user, shares=tuple(detached if n is node else n for n in facts(user).shares))


def _is_fixed(value: object, named: bool) -> bool:
    return named or value is None or isinstance(value, bool | int | float | str)


def _title(target: object) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def _name_for(target: object) -> str | None:
    """The name of a node where fx would choose badly; None leaves it to fx."""
    if target in IN_PLACE_OPERATORS:
        return IN_PLACE_OPERATORS[target].__name__
    # Modules are named after nodes: that of ``x.half()`` must not shadow ``nn.Module.half``.
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return f"{name}_value" if hasattr(nn.Module, name) else None


_NOTHING: frozenset[int] = frozenset()


def _memory(value: object) -> frozenset[int]:
    """Where a tensor, or those in a container, are in memory, which tells a view from a new tensor."""
    if isinstance(value, torch.Tensor):
        return frozenset({value.untyped_storage().data_ptr()} - {0}) if value.layout is torch.strided else _NOTHING
    return _NOTHING.union(*map(_memory, tensors_in(value)))
