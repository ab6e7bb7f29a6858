"""Values of nodes between two blocks, batch by batch: in memory or in files, and as plain data for a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from bitwright.reconstruction.columns import Memory


class Laid(NamedTuple):
    """A tensor with its memory layout, which kernels depend on, so that their results have the same bits."""

    span: Tensor  # from its first value in memory to its last
    path: Path | None
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor, memory: Memory) -> "Laid":
        """Copy a tensor."""
        length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        span, path = memory.empty((length,), value)
        span.copy_(value.as_strided((length,), (1,)))
        return cls(span, path, value.shape, value.stride())

    def tensor(self) -> Tensor:
        """A copy."""
        return self.span.clone().as_strided(self.size, self.stride)


class Values:
    """The values between blocks that are done and blocks to come."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[fx.Node, list[Any]] = {}
        self._done: set[fx.Node] = set()

    def add(self, node: fx.Node, value: Any) -> None:  # noqa: ANN401
        """Store the value for the next batch."""
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
        self._kept.setdefault(node, []).append(Laid.of(value.detach(), self._memory) if plain else value)

    def get(self, node: fx.Node, batch: int) -> Any:  # noqa: ANN401
        """The value for one batch, as a copy that may be written into."""
        value = self._kept[node][batch]
        if isinstance(value, Laid):
            return value.tensor()
        return value.clone() if isinstance(value, Tensor) else value

    def computed(self) -> Iterator[tuple[fx.Node, int, Any]]:
        """All stored values, except the inputs of the model: node, batch and value."""
        for node, kept in self._kept.items():
            if node.op != "placeholder":
                yield from ((node, batch, value) for batch, value in enumerate(kept))

    def finish(self, nodes: tuple[fx.Node, ...]) -> None:
        """Mark these nodes as done, and free the memory and files of values that nothing reads any more."""
        self._done.update(nodes)
        for node in [n for n in self._kept if all(user in self._done or user.op == "output" for user in n.users)]:
            for value in self._kept.pop(node):
                if isinstance(value, Laid) and value.path is not None:
                    value.path.unlink(missing_ok=True)
                elif isinstance(value, Laid):
                    self._memory.used -= value.span.nbytes


class CannotPack(Exception):
    """A value that plain data cannot hold."""


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """A value as plain data, with the bytes of its tensors separate; raises :class:`CannotPack` if impossible."""
    if isinstance(value, Laid):
        return _pack_tensor(value.span, value.size, value.stride, tensors)
    if type(value) is Tensor and value.layout is torch.strided and not value.numel():
        return _pack_tensor(value.reshape(-1), value.shape, value.stride(), tensors)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list, torch.Size):
        return {type(value).__name__: [pack(item, tensors) for item in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise CannotPack(type(value).__name__)


def _pack_tensor(span: Tensor, size: torch.Size, stride: tuple[int, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = str(len(tensors))
    tensors[name] = span.cpu().view(torch.uint8)
    dtype = str(span.dtype).removeprefix("torch.")
    return {"tensor": name, "dtype": dtype, "size": [*size], "stride": [*stride], "device": str(span.device)}


def unpack(data: object, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Undo :func:`pack`; the tensors are new ones."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        span = tensors[data["tensor"]].clone().view(getattr(torch, data["dtype"])).to(data["device"])
        return span.as_strided(data["size"], data["stride"])
    if "dtype" in data:
        return getattr(torch, data["dtype"])
    ((kind, items),) = data.items()
    return {"tuple": tuple, "list": list, "Size": torch.Size}[kind](unpack(item, tensors) for item in items)
