"""CapturedModel: an fx.GraphModule that keeps the user's whole module tree, under the user's names."""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bitwright.graph.capture.guards import check_input
from bitwright.torch_internals import HOOKS, MODULE_STATE

_CONTAINER = ("__len__", "__iter__", "__getitem__", "__contains__", "__reversed__")

# Names that every GraphModule has and a plain module does not.
_OF_GRAPH_MODULE = {*dir(fx.GraphModule), *vars(fx.GraphModule({}, fx.Graph()))} - {*dir(nn.Module), *vars(nn.Module())}


@dataclass(frozen=True)
class _Origin:
    """What is known about the module that a graph was recorded from.

    Attributes:
        inputs: the arguments of forward that are inputs of the graph.
        defaults: its other arguments, with their defaults.
        children: the names of its direct submodules.
    """

    inputs: tuple[str, ...]
    defaults: dict[str, Any]
    children: tuple[str, ...]


class _PlainInit(nn.Module):
    """Keeps ``GraphModule.__init__`` from calling the ``__init__`` of the user's class."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class CapturedModel(fx.GraphModule):
    """A graph over the user's own modules.

    Unlike a plain GraphModule it also holds modules the graph does not call (a BatchNorm folded into its
    convolution, an unused head), so that a float ``state_dict`` loads, and it keeps them when copied. Its class is
    created for it and derives from the user's, so it has the user's methods, such as ``generate``, which may call it.
    """

    _users_class: type[nn.Module] | None = None

    @classmethod
    def build(cls, root: nn.Module, graph: fx.Graph) -> "CapturedModel":
        """Put ``graph`` over the modules of ``root``."""
        # Begin with an empty graph: GraphModule would copy every module it calls, one by one.
        model = _subclass(cls, users_class(root))(root, fx.Graph(), class_name=type(root).__name__)
        inputs = tuple(str(n.target) for n in graph.nodes if n.op == "placeholder")
        model._adopt(root)
        model.__dict__["_origin"] = _Origin(inputs, _defaults(root, inputs), tuple(root._modules))
        for target in {str(n.target) for n in graph.nodes if n.op == "get_attr"}:
            value = root.__dict__.get(target)
            if isinstance(value, Tensor):  # created by forward, or a plain attribute of the root
                model.register_buffer(target, value, persistent=False)
        model.graph = graph
        return model

    def _adopt(self, root: nn.Module) -> None:
        """Take over the state, hooks and attributes of a module: the user may read a number or a config."""
        for name, value in root.__dict__.items():
            if name in MODULE_STATE or name in HOOKS:
                self.__dict__[name] = value.copy()
            elif name not in self.__dict__ and name != "forward" and not isinstance(value, Tensor):
                self.__dict__[name] = value

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "CapturedModel") -> None:
        fx.GraphModule.__init__(self, root, graph, class_name)

    def __init_subclass__(cls, **options: object) -> None:
        """Hide the subclasses created here from the user's class, which may keep a list of its subclasses."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the graph; arguments that the example inputs left out may only have forward's own defaults."""
        origin = self.__dict__["_origin"]
        for name in [n for n in kwargs if n not in origin.inputs]:
            if name not in origin.defaults:
                raise TypeError(
                    f"forward() got an unexpected keyword argument {name!r}: the model was captured with the inputs "
                    f"{', '.join(origin.inputs)}; to make it an input, add it to the example inputs"
                )
            check_input(kwargs.pop(name), origin.defaults[name], name)
        return super().__call__(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of that name; graphs ask often, so the usual case is a shortcut."""
        module: nn.Module = self
        for part in target.split(".") if target else ():
            found = module._modules.get(part)
            if found is None:
                return super().get_submodule(target)
            module = found
        return module

    def recompile(self) -> Any:
        """Generate forward from the graph again; its signature stays that of the user's forward."""
        code = super().recompile()
        type(self).forward.__signature__ = inspect.signature(users_class(self).forward)  # pyrefly: ignore
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        type(copied).__name__ = type(self).__name__
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.graph = copied.__dict__["_graph"]  # writes forward
        return copied


@contextmanager
def inputs_as_arguments(model: nn.Module) -> Iterator[None]:
    """Temporarily let a captured forward have the graph's inputs as its arguments.

    ``torch.export`` cannot leave sizes free inside of ``**kwargs``.
    """
    forward: Any = type(model).forward
    users = vars(forward).pop("__signature__", None) if isinstance(model, CapturedModel) else None
    try:
        yield
    finally:
        if users is not None:
            forward.__signature__ = users


def why_no_graph(root: nn.Module) -> str:
    """Why a module cannot have a graph, whatever it computes, or nothing."""
    taken = sorted(_OF_GRAPH_MODULE.intersection((*root._modules, *root._parameters, *root._buffers)))
    return f"its attribute {taken[0]!r} has a name that torch.fx needs" if taken else ""


def users_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or for a captured one, the class of the module it was captured from."""
    return (isinstance(module, CapturedModel) and type(module)._users_class) or type(module)


def _subclass(base: type[CapturedModel], users: type[nn.Module]) -> type[CapturedModel]:
    """A subclass of both, in which ``base`` takes precedence."""
    between = () if issubclass(users, fx.GraphModule) else (_PlainInit,)
    kind: Any = types.new_class(users.__name__, (base, *between, users))
    kind._users_class = users
    for name in _CONTAINER:
        method = inspect.getattr_static(users, name, None)
        if method is not None:
            setattr(kind, name, _on_users_children(method, users))
    return kind


def _on_users_children(method: Callable[..., Any], users: type[nn.Module]) -> Callable[..., Any]:
    """A method of a container, such as ``__len__``, that does not see what Bitwright added to the model."""

    @functools.wraps(method)
    def call(self: CapturedModel, *args: object) -> Any:
        seen = object.__new__(users)
        members = {name: self._modules[name] for name in self.__dict__["_origin"].children}
        seen.__dict__.update(self.__dict__, _modules=members)
        return method(seen, *args)

    return call


def _defaults(root: nn.Module, inputs: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of forward that are not inputs of the graph, with their defaults."""
    parameters = inspect.signature(root.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in inputs}
