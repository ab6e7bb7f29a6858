"""Facts: typed knowledge about each node of a graph, read with ``facts`` and written only with ``set_facts``."""

from typing import Any, NamedTuple

import torch
from torch import fx

from bitwright.graph.names import node_name

_KEY = "bitwright"  # in ``node.meta``, which fx copies with the node
_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor seen on the example inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Facts(NamedTuple):
    """What capture, or whatever created a node, knows about it.

    Immutable: fx copies a node's ``meta`` shallowly, so copies of a node share one object.

    Attributes:
        tensor: shape and dtype of the result, if it is one tensor.
        scope: the qualified name of the module in whose forward the call stands.
        plain: whether the result is a number, a size or the like, not data.
        grad: whether gradients were recorded where the call stands.
        shares: the inputs whose memory the result shares; dropped once in-place operations are functional.
        written: whether something writes into its memory while others read it, so that it must not be quantized.
        leaf: why this module is kept whole, if it is.
        replaces: the names of the nodes in whose place a schedule has put this one.
        origin: the name of the captured call that a schedule replaced by this node, alone or with others.
        part_of: what the user calls the operator that a schedule split into this node and others.
        skipped: the rule that leaves it float, so that no schedule needs to prepare it for integers.
        joins: whether the backend may compute it together with the operator before it.
    """

    tensor: TensorInfo | None = None
    scope: str = ""
    plain: bool = False
    grad: bool = True
    shares: tuple[fx.Node, ...] = ()
    written: bool = False
    leaf: str = ""
    replaces: tuple[str, ...] = ()
    origin: str = ""
    part_of: str = ""
    skipped: str = ""
    joins: bool = False


_UNKNOWN = Facts()


def facts(node: fx.Node) -> Facts:
    """What is known about a node; defaults where nothing was noted."""
    return node.meta.get(_KEY, _UNKNOWN)


def user_name(node: fx.Node) -> str:
    """What the user calls the operator that a node computes, alone or as a part of it."""
    return facts(node).part_of or node_name(node)


def has_facts(node: fx.Node) -> bool:
    """Whether anything was noted about a node."""
    return _KEY in node.meta


def noted_by_torch(node: fx.Node, key: str) -> Any:
    """What torch itself noted about a node, such as the modules it was called in; None if nothing."""
    return node.meta.get(key)


def note_as_torch(node: fx.Node, like: fx.Node, value: object) -> None:
    """Note about a node of a torch program what torch noted about another, and its own value."""
    node.meta = {**like.meta, "val": value}


def set_facts(node: fx.Node, **changes: object) -> None:
    """Change some facts of one node; copies of it keep theirs."""
    node.meta[_KEY] = facts(node)._replace(**changes)  # pyrefly: ignore


def set_value(node: fx.Node, value: object, **more: object) -> None:
    """Note what a node's value on the example inputs shows, and ``more``."""
    set_facts(node, tensor=tensor_info(value), plain=isinstance(value, _PLAIN), **more)


def copy_facts(source: fx.Node, target: fx.Node) -> None:
    """Copy the facts of a node to the one that stands in for it."""
    target.meta.update(source.meta)


def inherit_facts(source: fx.Node, target: fx.Node) -> None:
    """Give a new node the facts of the one it replaces, except where it has its own."""
    written = facts(source).written
    target.meta = {**source.meta, **target.meta}
    if written:
        set_facts(target, written=True)


def tensor_info(value: object) -> TensorInfo | None:
    """Shape and dtype of a tensor; None for anything else."""
    return TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def shape_of(node: object) -> tuple[int, ...] | None:
    """The shape of a node's tensor on the example inputs; None for anything but a tensor."""
    info = facts(node).tensor if isinstance(node, fx.Node) else None
    return None if info is None else info.shape


def dtype_of(node: object) -> torch.dtype | None:
    """The dtype of a node's tensor on the example inputs; None for anything but a tensor."""
    info = facts(node).tensor if isinstance(node, fx.Node) else None
    return None if info is None else info.dtype


def is_floating(node: object) -> bool:
    """Whether a node returns a floating-point tensor."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point
