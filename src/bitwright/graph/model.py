"""CapturedModel: an fx.GraphModule that keeps the user's whole module tree, under the user's names."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from bitwright.graph.capture.guards import check_constant


def _is_hooks(name: str) -> bool:
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


_STATE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
_CONTAINER = ("__len__", "__iter__", "__getitem__", "__contains__", "__reversed__")


class _AnsweringForOrigin(type):
    """The class of a captured model has the methods of the user's class: ``type(model).method`` finds them."""

    def __getattr__(cls, name: str) -> Any:
        origin = cls.__dict__.get("_origin")
        if origin is None or name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(origin, name)


class CapturedModel(fx.GraphModule, metaclass=_AnsweringForOrigin):
    """A graph over the user's own modules.

    Unlike a plain GraphModule it also holds modules the graph does not call (a BatchNorm folded into its
    convolution, an unused head), so that a float ``state_dict`` loads; and it keeps them when copied. It also answers
    for the plain attributes and the methods of the user's class, such as ``generate``, which may call it, and passes
    for an instance of that class.
    """

    @classmethod
    def build(cls, root: nn.Module, graph: fx.Graph) -> "CapturedModel":
        """Put ``graph`` over the modules of ``root``."""
        # Begun with an empty graph: GraphModule would copy every module it calls, one by one.
        model = cls(root, fx.Graph(), class_name=type(root).__name__)
        model.__dict__["_origin"] = type(root)
        model.__dict__["_inputs"] = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        model.__dict__["_defaults"] = _defaults(root, model.__dict__["_inputs"])
        model.__dict__["_own_children"] = list(root._modules)
        for name, value in root.__dict__.items():
            if name in _STATE or _is_hooks(name):
                model.__dict__[name] = value.copy()
            elif name not in model.__dict__ and name != "forward" and not isinstance(value, Tensor):
                model.__dict__[name] = value  # a number, a config: the user may ask for it
        for target in {str(n.target) for n in graph.nodes if n.op == "get_attr"}:
            value = root.__dict__.get(target)
            if isinstance(value, Tensor):  # one that forward made, or a plain attribute of the root
                model.register_buffer(target, value, persistent=False)
        model.graph = graph
        model._answer_for_origin()
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; arguments that the example inputs left out may be given only as forward's own defaults."""
        defaults, inputs = self.__dict__["_defaults"], self.__dict__["_inputs"]
        for name in [n for n in kwargs if n not in inputs]:
            if name not in defaults:
                raise TypeError(
                    f"forward() got an unexpected keyword argument {name!r}: the model was captured with the inputs "
                    f"{', '.join(inputs)}; what is to be an input must be among the example inputs"
                )
            check_constant(kwargs.pop(name), defaults[name], name)
        return super().__call__(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of that name; graphs ask this often, so the usual case takes the short way."""
        module: nn.Module = self
        for part in target.split(".") if target else ():
            found = module.__dict__["_modules"].get(part)
            if found is None:
                return super().get_submodule(target)
            module = found
        return module

    def recompile(self) -> Any:
        """Write forward anew from the graph; asked for its signature, it gives that of the user's forward."""
        code = super().recompile()
        origin = self.__dict__.get("_origin")
        if origin is not None:
            type(self).forward.__signature__ = inspect.signature(origin.forward)  # pyrefly: ignore
        return code

    @property
    def __class__(self) -> type:  # pyrefly: ignore
        """The user's class: ``isinstance`` and ``super()`` in its methods go by this."""
        return self.__dict__.get("_origin") or type(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = inspect.getattr_static(self.__dict__.get("_origin"), name, None)
            if found is None or name.startswith("__"):
                raise
            return found.__get__(self, self.__dict__["_origin"]) if hasattr(found, "__get__") else found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = super().__deepcopy__(memo)
        for name, value in self.__dict__.items():
            if name in _STATE or _is_hooks(name) or name not in copied.__dict__:
                copied.__dict__[name] = copy.deepcopy(value, memo)
        copied._answer_for_origin()
        return copied

    def _answer_for_origin(self) -> None:
        """Let ``len(model)``, ``model[0]`` and loops work where the user's class has them; each model has its class."""
        type(self)._origin = self.__dict__["_origin"]
        type(self).forward.__signature__ = inspect.signature(self.__dict__["_origin"].forward)  # pyrefly: ignore
        for name in _CONTAINER:
            method = inspect.getattr_static(self.__dict__["_origin"], name, None)
            if method is not None:
                setattr(type(self), name, _seen_as_before(method))


def _seen_as_before(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a container, for which the quantizers that were placed beside its members do not exist."""

    @functools.wraps(method)
    def answer(self: CapturedModel, *args: Any) -> Any:
        seen = object.__new__(self.__dict__["_origin"])
        members = {name: self._modules[name] for name in self.__dict__["_own_children"]}
        seen.__dict__.update(self.__dict__, _modules=members)
        return method(seen, *args)

    return answer


def _defaults(root: nn.Module, inputs: list[str]) -> dict[str, Any]:
    """The arguments of forward that are no inputs of the graph, with their defaults."""
    parameters = inspect.signature(root.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in inputs}
