"""Threads and processes: overlapping work, forks while a thread holds a lock, and DataLoaders with workers."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from bitwright.exporting.onnx import quiet
from bitwright.numerics import fused
from bitwright.quantizer import TensorQuantizer
from tests.threads import rounds, simulate


def test_threads_that_overlap():
    """A sample; ``python -m tests.threads 200`` takes longer."""
    assert rounds(2) == []


def in_a_fork(work, seconds=60):
    """Whether ``work`` returns True in a forked process, in time."""
    child = os.fork()
    if child == 0:  # nothing here may raise: pytest would go on in both processes
        works = False
        with contextlib.suppress(BaseException):
            works = work()
        os._exit(0 if works else 1)
    deadline = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return done == (child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("lock", [quiet._one_at_a_time, fused._compiling], ids=["export", "compile"])
def test_a_forked_process_is_not_locked_out(lock):
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock.now:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        assert in_a_fork(lambda: lock.now.acquire(timeout=5))
        assert not lock.now.acquire(blocking=False)
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_prepares_and_calibrates():
    expected = simulate(2, None)
    assert in_a_fork(lambda: simulate(2, None) == expected)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loaders_with_workers(context):
    """In a process of its own: a DataLoader leaves a handler of SIGCHLD behind."""
    command = [sys.executable, "-m", "tests.loaders", context]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr


def test_a_thread_learns_while_another_exports():
    quantizer = TensorQuantizer("int4", method="LearnableFakeQuantize")
    quantizer.set_range(-1.0, 1.0)
    quantizer.quantize()
    exporting, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            exporting.set()
            done.wait(60)
            return x + 1

    with ThreadPoolExecutor(1) as pool:
        exported = pool.submit(torch.export.export, Waits(), (torch.randn(2),))
        assert exporting.wait(60)
        assert torch.compiler.is_exporting()
        x = torch.randn(8, requires_grad=True)
        quantizer(x).sum().backward()
        done.set()
        exported.result()
    assert [p.grad is not None for p in quantizer.parameters()] == [True]
    assert x.grad is not None
