"""Capture in threads: several at once, and others that run models meanwhile and notice nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.graph import capture_model
from bitwright.graph.capture import patches
from bitwright.graph.capture.proxy import ValueProxy
from bitwright.torch_internals import find_attribute
from tests.graph.capture.capturing import DataDependent, Net, image

PATCHED = {**patches._RUN.wraps, **patches._RECORD.wraps}


def noisy(self, x):
    """Sizes, new tensors, random numbers, and a branch by data further in."""
    y = self.conv(x) + torch.rand(x.shape[0], 1, 1, 1) + torch.zeros(x.shape[2])
    return self.by_data(y) if isinstance(x, torch.Tensor) else y


def originals():
    return [vars(owner)[name] for owner, name in map(find_attribute, PATCHED)]


def test_threads_prepare_at_once():
    before = originals()
    x = image()
    nets = [Net(noisy, by_data=DataDependent()).eval() for _ in range(4)]
    start = threading.Barrier(len(nets))

    def work(model):
        start.wait()
        return [bw.prepare(model, x) for _ in range(6)]

    state = torch.get_rng_state()
    with ThreadPoolExecutor(len(nets)) as pool:
        results = list(pool.map(work, nets))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(originals(), before, strict=True))
    for model, prepared in zip(nets, results, strict=True):
        for quantized in prepared:
            assert list(bw.ledger_of(quantized).islands) == ["by_data"]
            torch.manual_seed(0)
            expected = model(x)
            torch.manual_seed(0)
            assert torch.equal(quantized(x), expected)


class Waiting(nn.Module):
    """Stops in the middle of its trace until it may continue."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        if type(x) is ValueProxy:
            REACHED.set()
            assert GO_ON.wait(60)
        return y + torch.ones(x.shape[0], 1)


REACHED, GO_ON = threading.Event(), threading.Event()


@pytest.fixture
def traced_elsewhere():
    """Another thread is in the middle of a trace; afterwards it must have succeeded."""
    REACHED.clear()
    GO_ON.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(capture_model, Waiting().eval(), torch.randn(2, 4))
        assert REACHED.wait(60)
        assert nn.Module.__call__ is not ORIGINAL_CALL
        yield
        GO_ON.set()
        captured = future.result(60)
    assert captured.islands == {}
    called = [str(n.target) for n in captured.regions[""].graph.nodes if n.op == "call_module"]
    assert called == ["fc"]
    assert nn.Module.__call__ is ORIGINAL_CALL


ORIGINAL_CALL, BUILTIN = nn.Module.__call__, isinstance


def test_other_threads_run_models_as_ever(traced_elsewhere):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    model.register_buffer("offset", torch.zeros(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(3, 4))
    assert out.dtype is torch.bfloat16
    assert type(model[0].weight) is nn.Parameter
    assert type(model.offset) is torch.Tensor
    made = [torch.zeros(2), torch.rand(2), torch.arange(3), torch.tensor([1.0]), torch.full((2,), 3.0)]
    assert all(type(tensor) is torch.Tensor for tensor in made)
    x = torch.randn(3, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    model(torch.randn(3, 4)).sum().backward()
    assert isinstance(model, nn.Module)
    assert not isinstance(out, nn.Module)


def test_other_threads_keep_the_fast_path_of_attention(traced_elsewhere):
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_captures_while_another_thread_was_in_a_trace(traced_elsewhere):
    """The other thread, which holds locks and has patched names, does not go on in the new process."""
    model, x = Net(sized).eval(), image()
    child = os.fork()
    if child == 0:  # nothing here may raise: pytest would go on in both processes
        works = False
        with contextlib.suppress(BaseException):
            unpatched = nn.Module.__call__ is ORIGINAL_CALL and isinstance is BUILTIN
            works = unpatched and torch.equal(bw.prepare(model, x)(x), model(x))
        os._exit(0 if works else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


def sized(self, x):
    return self.conv(x) + torch.zeros(x.shape[0], 1, 1, 1) * (2 if isinstance(x, torch.Tensor) else 3)


def test_other_threads_can_compile_meanwhile(traced_elsewhere):
    model, x = Net(sized).eval(), image()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


AFTER_A_COMPILED_MODEL = """
import torch
import bitwright as bw
from torch import nn

class Inner(nn.Module):
    def forward(self, x):
        return x + torch.ones(x.shape[0], 1)

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(4, 4), torch.compile(Inner(), backend="eager")

    def forward(self, x):
        return self.inner(self.fc(x))

model, x = Outer().eval(), torch.randn(2, 4)
quantized = bw.prepare(model, x)
assert torch.equal(quantized(x), model(x))

@torch.compile(backend="eager", fullgraph=True)
def compiled(x):
    return x + torch.zeros(2, 4) if isinstance(x, torch.Tensor) else x

assert torch.equal(compiled(x), x)
"""


def test_torch_compile_works_as_before_after_a_captured_model_loaded_it():
    subprocess.run([sys.executable, "-c", AFTER_A_COMPILED_MODEL], check=True, timeout=300)


def test_other_threads_can_capture_meanwhile(traced_elsewhere):
    model, x, captured = Net(sized).eval(), image(), []
    thread = threading.Thread(target=lambda: captured.append(capture_model(model, x)))
    thread.start()
    thread.join(0.5)  # trial runs take turns, as torch has one generator: it waits for the other, or is done
    GO_ON.set()
    thread.join(60)
    assert captured[0].islands == {}
    assert torch.equal(captured[0].model(x), model(x))


def test_a_capture_inside_a_capture():
    def body(self, x):
        if type(x) is ValueProxy:
            inner = capture_model(nn.Linear(2, 2), torch.randn(1, 2))
            assert inner.islands == {}
        return self.conv(x) * 2

    before = originals()
    captured = capture_model(Net(body).eval(), image())
    assert captured.islands == {}
    assert all(a is b for a, b in zip(originals(), before, strict=True))


def test_a_signal_while_names_are_replaced_or_restored_leaves_them_as_they_were(monkeypatch):
    before, handler = originals(), signal.signal(signal.SIGINT, signal.default_int_handler)
    name, again = "torch.zeros", patches._RECORD.wraps["torch.zeros"]
    monkeypatch.setitem(patches._RECORD.wraps, name, lambda own: (signal.raise_signal(signal.SIGINT), again(own))[1])
    try:
        with pytest.raises(KeyboardInterrupt):
            capture_model(Net(sized).eval(), image())
        assert all(a is b for a, b in zip(originals(), before, strict=True))
        monkeypatch.undo()
        with pytest.raises(KeyboardInterrupt), patches._RECORD():
            patches._RECORD.undo.append(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert all(a is b for a, b in zip(originals(), before, strict=True))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_names_are_replaced_leaves_them_as_they_were(error, monkeypatch):
    def fail(own):
        raise error

    before = originals()
    monkeypatch.setitem(patches._RECORD.wraps, "torch.zeros", fail)
    with pytest.raises(error), patches._RECORD():
        pytest.fail("nothing may be recorded")
    assert all(a is b for a, b in zip(originals(), before, strict=True))


def test_an_error_in_one_thread_leaves_the_others_alone(traced_elsewhere):
    def body(self, x):
        raise KeyboardInterrupt

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            capture_model(Net(body), image())
        return True

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(interrupted)
        GO_ON.set()
        assert other.result(60)


FIRST_USE = """
import threading, torch
from torch import nn
import bitwright
from bitwright.graph.capture import patches

def elsewhere():
    with torch.device("cpu"):  # the first use in this process, while another thread records
        torch.empty(0)

with patches._RECORD(), patches._RUN():
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
with torch.device("meta"):
    print(nn.Linear(2, 2).weight.is_meta, torch.zeros(2).is_meta)
"""


def test_devices_work_as_contexts_after_a_first_use_during_a_capture():
    ran = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True)
    assert ran.stdout == "True True\n"
