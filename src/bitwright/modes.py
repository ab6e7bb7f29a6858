"""Restore what changes: the modes of a model's modules, and torch's random numbers; locks that survive a fork."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ForkableLock:
    """A lock that is new in a forked process, where the thread that may hold it no longer runs.

    Attributes:
        now: the lock of this process; release the one that you acquired.
    """

    def __init__(self, kind: Callable[[], Any] = threading.RLock) -> None:
        self._kind, self.now = kind, kind()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.now = self._kind()


_one_generator = ForkableLock()  # torch has one for all threads


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Draw random numbers that the caller will draw again; one thread at a time, as they share torch's generator."""
    with _one_generator.now, torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Temporarily put every module into eval mode, even a frozen BatchNorm, then restore each mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
