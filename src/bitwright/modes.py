"""Leave things as they were: the modes of a model's modules, and torch's random numbers."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_one_generator = threading.RLock()  # torch has one for all threads


def _new_lock() -> None:
    """Reset in a forked process, where the thread that may hold the lock does not go on."""
    global _one_generator
    _one_generator = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Draw random numbers that the caller will draw, too; one thread at a time, as they share torch's generator."""
    with _one_generator, torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode for a while, a frozen BatchNorm as well; afterwards each has its mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
