"""Columns: one tensor of a graph over all batches, in memory or, above a limit, in files mapped to memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import ConfigError
from bitwright.files import in_words


class Memory:
    """Allocates tensors, and files mapped to memory once ``limit`` bytes are in use."""

    def __init__(self, limit: float, folder: Path) -> None:
        self.limit, self.folder = limit, folder
        self.used = self.files = 0

    def empty(self, shape: Sequence[int], like: Tensor) -> tuple[Tensor, Path | None]:
        """A tensor of that shape, and its file if it has one."""
        size = torch.Size(shape).numel()
        length = size * like.element_size()
        if not size or self.used + length <= self.limit:
            self.used += length
            return like.new_empty(shape), None
        self.files += 1
        path = self.folder / f"{self.files}.bin"
        _reserve(path, length)
        return torch.from_file(str(path), shared=True, size=size, dtype=like.dtype).view(*shape), path


def _reserve(path: Path, length: int) -> None:
    """Make a file of that length now: a full disk kills a process that writes to a mapped file."""
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, length)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"{length:,} bytes of values do not fit into {str(path.parent.parent)[:200]!r}: {in_words(error)}; raise "
            "memory_limit, or name another folder in TMPDIR"
        ) from error


class Column:
    """The values of one tensor, or any other result of a node, batch by batch.

    Tensors with one row per sample are stored in one block, so that any samples can be drawn.

    ``last`` lays tensors out with the channels of images last.
    """

    def __init__(self, sizes: Sequence[int], memory: Memory, *, last: bool = False) -> None:
        self.sizes, self.memory, self.last = sizes, memory, last
        self.values: list[Any] = []
        self.block: Tensor | None = None
        self._path: Path | None = None
        self._device: torch.device | None = None

    def append(self, value: object) -> None:
        """Add the value for the next batch."""
        number = len(self.values)
        if isinstance(value, Tensor):
            value, self._device = value.detach(), value.device
            if number == 0 and value.ndim and value.shape[0] == self.sizes[0]:
                self.last = self.last and value.ndim == 4
                shape = _channels_last(value).shape if self.last else value.shape
                block, self._path = self.memory.empty((sum(self.sizes), *shape[1:]), value)
                self.block = _channels_first(block) if self.last else block
            start = sum(self.sizes[:number])
            place = None if self.block is None else self.block[start : start + self.sizes[number]]
            if place is not None and place.shape == value.shape and place.dtype == value.dtype:
                value = place.copy_(value)
            else:
                self.block = None  # batches differ, so they are drawn as a whole
                value = value.clone()
        else:
            self.block = None
        self.values.append(value)

    def batch(self, number: int) -> Any:  # noqa: ANN401
        """The node's result for one batch, as a copy that may be written into."""
        value = self.values[number]
        return value.to(self._device, copy=True) if isinstance(value, Tensor) else value

    def rows(self, chosen: Tensor) -> Tensor:
        """The samples of these numbers."""
        if self.block is None:
            raise ValueError("the values of this node are not one row per sample")
        chosen = chosen.to(self.block.device)
        if self.last:  # in memory order: index_select returns a contiguous result
            return _channels_first(_channels_last(self.block).index_select(0, chosen)).to(self._device)
        return self.block.index_select(0, chosen).to(self._device)

    def free(self) -> None:
        """Free the memory or the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        elif self.block is not None:
            self.memory.used -= self.block.nbytes
        self.values, self.block, self._path = [], None, None


def _channels_last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


def _channels_first(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2)
