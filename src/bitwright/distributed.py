"""Several processes under torchrun: messages travel as tensors of bytes, and no process waits forever.

Everything here also works in a single process, as a group of one.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from bitwright.errors import BitwrightError, CalibrationError, ConfigError, DistributedError

TIMEOUT = 1800.0  # seconds
_LONGEST = 1e9  # seconds; torch counts in nanoseconds


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def job_name(job: str) -> str:
    """The name of this process's part of a job in which each has its own data."""
    return job if world_size() == 1 else f"{job}-{rank()}-of-{world_size()}"


class Ranks:
    """All processes, which exchange messages in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group, self._timeout = group, timeout

    @property
    def alone(self) -> bool:
        """Whether there is only one process."""
        return self._group is None

    @property
    def count(self) -> int:
        """How many processes there are."""
        return 1 if self._group is None else world_size()

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """Wait for all others; one that ended is noticed at once, one that hangs after the timeout."""
        with _waiting(self._timeout):
            dist.monitored_barrier(self._group, timedelta(seconds=self._timeout))
            yield

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of each of these numbers over all processes."""
        found = self.gather(struct.pack(f"{len(numbers)}d", *numbers))
        return [sum(each) for each in zip(*(struct.unpack(f"{len(numbers)}d", data) for data in found), strict=True)]

    def average(self, tensors: Sequence[Tensor | None]) -> None:
        """Set each tensor to its mean over all processes; a missing gradient (None) must be missing on all."""
        if self._group is None:
            return
        given = [tensor for tensor in tensors if tensor is not None]
        flat = torch.cat([tensor.detach().reshape(-1).float().cpu() for tensor in given])
        with self._all_there():
            dist.all_reduce(flat, group=self._group)
        parts = (flat / self.count).split([tensor.numel() for tensor in given])
        for tensor, part in zip(given, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def gather(self, data: bytes) -> list[bytes]:
        """The values from every process, by rank."""
        if self._group is None:
            return [data]
        with self._all_there():
            mine = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = mine[: len(data)]
            found = [torch.zeros_like(padded) for _ in sizes]
            dist.all_gather(found, padded, group=self._group)
        return [f[: int(size)].numpy().tobytes() for f, size in zip(found, sizes, strict=True)]

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The named tensors of every process, by rank."""
        if self._group is None:
            return [dict(tensors)]
        return [load(data) for data in self.gather(save({n: t.cpu().contiguous() for n, t in tensors.items()}))]

    @contextmanager
    def together(self, error_type: type[BitwrightError] = DistributedError) -> Iterator[None]:
        """Do something in every process; if it fails in one, it fails in all, with the reason."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._group is None or isinstance(error, DistributedError):
                raise
            failed = error
        texts = self.gather(b"" if failed is None else f"{type(failed).__name__}: {failed}"[:1500].encode())
        if failed is not None:
            raise failed
        for number, text in enumerate(texts):
            if text:
                raise error_type(f"rank {number} failed: {text.decode()}")

    def agree(self, what: str, value: str, hint: str = "") -> None:
        """Raise in every process unless all have the same value; ``hint`` says what to do about it."""
        values = [data.decode() for data in self.gather(value.encode())]
        odd = next((number for number, other in enumerate(values) if other != values[0]), None)
        if odd is not None:
            found = f"{values[0]} on rank 0, {values[odd]} on rank {odd}"
            raise CalibrationError(f"{what} differs between ranks: {found}{hint and f'; {hint}'}")


@contextmanager
def all_ranks(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Yield all processes; they communicate over the CPU, whatever device they compute on."""
    if not 0 < timeout <= _LONGEST:
        raise ConfigError(f"timeout={timeout!r} must be a number of seconds above 0 and at most {_LONGEST:g}")
    if world_size() == 1:
        yield Ranks(None, timeout)
        return
    if dist.get_backend() == "gloo":  # already connected: connecting again would wait for one that just ended
        yield Ranks(dist.group.WORLD, timeout)
        return
    with _waiting(timeout):
        group: Any = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    try:
        yield Ranks(group, timeout)
    finally:
        dist.destroy_process_group(group)


@contextmanager
def _waiting(timeout: float) -> Iterator[None]:
    """Report in plain words that another process is gone."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DistributedError(
            f"rank {rank()} of {world_size()} waited up to {timeout:g} s (set by timeout=) for the others, and one of "
            f"them ended, hangs, or does something else: {reason}"
        ) from error


def from_first_rank(action: Callable[[], bytes], timeout: float = TIMEOUT) -> bytes:
    """Do something on rank 0 while the others wait; all get its result, or an error if it fails."""
    with all_ranks(timeout) as ranks:
        with ranks.together():
            data = action() if rank() == 0 else b""
        return ranks.gather(data)[0]


@contextmanager
def under_torchrun() -> Iterator[None]:
    """Join the processes that torchrun started, if any, inside this context."""
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
