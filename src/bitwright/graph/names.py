"""Names in a model: of nodes, of what they call and read, and of what Bitwright adds."""

from collections.abc import Mapping
from typing import Any, cast

from torch import fx, nn

_NAMESPACE = "bitwright"


class Namespace(nn.Module):
    """Holds every module that Bitwright adds to a model, under a name that the model does not use."""


def namespace(model: nn.Module) -> str:
    """The name of a model's Namespace; one is added if the model has none.

    It is ``bitwright``, or numbered if the model uses that name for anything. It depends on the model alone, so a
    state dict of one copy of a model loads into another.
    """
    for name, child in reversed(model._modules.items()):  # it is usually among the last
        if isinstance(child, Namespace):
            return name
    name = free_name(model, _NAMESPACE)
    model.add_module(name, Namespace())
    return name


def add_internal(model: nn.Module, kind: str, wish: str, module: nn.Module) -> str:
    """Add a module to the ``kind`` part of a model's Namespace, named as wished or numbered; return its full name."""
    path = [namespace(model), kind]
    parent = container(model, path)
    name = free_name(parent, wish)
    parent.add_module(name, module)
    return ".".join([*path, name])


def node_name(node: fx.Node) -> str:
    """What the user calls a node: the qualified name of the user's module, or the node's name."""
    return str(node.target) if node.op == "call_module" and not _calls_internal(node) else node.name


def _calls_internal(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    first = str(node.target).partition(".")[0]
    return owner is not None and isinstance(owner._modules.get(first), Namespace)


def qualified(path: str, name: str) -> str:
    """The name of something inside the module at ``path``, seen from the whole model."""
    return f"{path}.{name}" if path and name else path or name


def module_of(node: object, model: nn.Module) -> nn.Module | None:
    """The module that a node calls, if it calls one."""
    return model.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def attribute_of(model: nn.Module, target: str) -> Any:
    """What a ``get_attr`` node reads."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def free_name(owner: nn.Module, wish: str) -> str:
    """The name wished for an attribute, with a number where it is taken."""
    name, count = wish, 0
    while hasattr(owner, name):
        count += 1
        name = f"{wish}_{count}"
    return name


def container(model: nn.Module, path: list[str]) -> nn.Module:
    """The module at a path, with empty ones made on the way where there are none."""
    parent = model
    for part in path:
        if parent._modules.get(part) is None:
            parent.add_module(part, nn.Module())
        parent = cast(nn.Module, parent._modules[part])
    return parent


def replace_modules(model: nn.Module, swapped: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules inside of a model in the place of others, under all their names."""
    for parent in list(model.modules()) if swapped else ():
        for name, module in list(parent._modules.items()):
            if module is not None and module in swapped:
                parent._modules[name] = swapped[module]


def put_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name, making containers on the way where there are none."""
    *path, last = name.split(".")
    container(model, path)._modules[last] = module
