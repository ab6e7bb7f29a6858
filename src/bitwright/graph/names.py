"""Names in a model: of nodes, of what they call and read, and of what is added to it."""

from typing import Any

from torch import fx, nn


def node_name(node: fx.Node) -> str:
    """What the user calls a node: the module's qualified name, or the node's name."""
    return str(node.target) if node.op == "call_module" else node.name


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
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    return parent


def put_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name, making containers on the way where there are none."""
    *path, last = name.split(".")
    container(model, path)._modules[last] = module
