"""The stack on which signals are handled is the same after code that replaces it."""

import ctypes
import sys

import pytest

from bitwright.signals import signal_stack_kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layout of stack_t is that of Linux")


class Stack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def exchange(new=None):
    """The current stack of signals, which a new one may replace."""
    found = Stack()
    assert ctypes.CDLL(None).sigaltstack(None if new is None else ctypes.byref(new), ctypes.byref(found)) == 0
    return found.start, found.flags, found.size


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_replaced_stack_comes_back(error):
    memory = ctypes.create_string_buffer(1 << 16)
    before = exchange()
    try:
        with signal_stack_kept():
            exchange(Stack(ctypes.addressof(memory), 0, len(memory)))
            assert exchange()[0] == ctypes.addressof(memory)
            if error is not None:
                raise error
    except ValueError:
        assert error is ValueError
    assert exchange() == before


def test_openvino_leaves_the_stack_as_it_is(tmp_path):
    pytest.importorskip("openvino")
    import torch

    import bitwright as bw
    from bitwright.exporting.onnx.file import OnnxFile
    from bitwright.verification import RUNTIMES

    x = torch.randn(1, 4)
    model = bw.calibrate(bw.prepare(torch.nn.Linear(4, 4), x, "openvino"), [x])
    file = OnnxFile.read(bw.export(model, tmp_path / "net.onnx").path)
    before = exchange()
    session = RUNTIMES.get("openvino")().session(file, threads=1)
    assert exchange() == before
    del session
    assert exchange() == before
