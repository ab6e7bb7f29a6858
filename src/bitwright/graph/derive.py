"""What is known of a new node: its scope, and the shape and type of its tensor, found without computing anything."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph.match.index import instance_of
from bitwright.graph.tracer import TensorInfo

_UNKNOWN = object()


def describe_new(model: fx.GraphModule, nodes: Iterable[fx.Node], scope: str) -> None:
    """Give ``nodes``, in the order of their computation, the notes that capture would have given them."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        node.meta.setdefault("scope", scope)
        if "tensor" in node.meta:
            continue
        value = values[node] = _value(model, node, values)
        node.meta["tensor"] = TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        node.meta["plain"] = value is not _UNKNOWN and isinstance(value, bool | int | float | str | torch.Size)


def _value(model: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a node would give, as a tensor without data; or ``_UNKNOWN``."""
    inputs = {n: values.get(n, _stand_in(n)) for n in node.all_input_nodes}
    if any(v is _UNKNOWN for v in inputs.values()):
        return _UNKNOWN
    args: Any = fx.node.map_arg(node.args, inputs.__getitem__)  # pyrefly: ignore
    kwargs: Any = fx.node.map_arg(node.kwargs, inputs.__getitem__)  # pyrefly: ignore
    instance = instance_of(node, model)
    try:
        with torch.no_grad():
            if node.op == "get_attr":
                return instance.to("meta") if isinstance(instance, torch.Tensor) else instance
            if isinstance(instance, nn.Module):
                return _call_module(instance, args, kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return instance(*args, **kwargs)
    except Exception:  # whatever an operator dislikes about tensors without data: then nothing is known
        return _UNKNOWN


def _stand_in(node: fx.Node) -> Any:
    info = node.meta.get("tensor")
    return _UNKNOWN if info is None else torch.empty(info.shape, dtype=info.dtype, device="meta")


def _call_module(module: nn.Module, args: Any, kwargs: Any) -> Any:
    state = {name: value.to("meta") for name, value in (*module.named_parameters(), *module.named_buffers())}
    return torch.func.functional_call(module, state, args, kwargs)
