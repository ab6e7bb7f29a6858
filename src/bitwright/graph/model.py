"""CapturedModel: an fx.GraphModule that keeps the user's whole module tree, under the user's names."""

import copy
import inspect
from typing import Any

from torch import Tensor, fx, nn


def _is_hooks(name: str) -> bool:
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


_STATE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class CapturedModel(fx.GraphModule):
    """A graph over the user's own modules.

    Unlike a plain GraphModule it also holds modules the graph does not call (a BatchNorm folded into its
    convolution, an unused head), so that a float ``state_dict`` loads; and it keeps them when copied. It also answers
    for the plain attributes and the methods of the user's class, such as ``generate``, which may call it.
    """

    @classmethod
    def build(cls, root: nn.Module, graph: fx.Graph) -> "CapturedModel":
        """Put ``graph`` over the modules of ``root``."""
        # Begun with an empty graph: GraphModule would copy every module it calls, one by one.
        model = cls(root, fx.Graph(), class_name=type(root).__name__)
        model.__dict__["_origin"] = type(root)
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
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = inspect.getattr_static(self.__dict__.get("_origin"), name, None)
            if found is None or name.startswith("__"):
                raise
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        for name, value in self.__dict__.items():
            if name in _STATE or _is_hooks(name) or name not in copied.__dict__:
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied
