"""Signals that wait until what they would interrupt is done, and the stack that their handlers run on."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_STACK_SIZE = 64  # more than the bytes of a stack_t on any system


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Keep the stack on which this thread handles signals.

    OpenVINO replaces it when it compiles a model, and later unmaps its own: the next signal, such as Ctrl-C, would then
    kill the process.
    """
    exchange = getattr(ctypes.CDLL(None), "sigaltstack", None) if hasattr(signal, "pthread_kill") else None
    before = ctypes.create_string_buffer(_STACK_SIZE)
    known = exchange is not None and exchange(None, before) == 0
    try:
        yield
    finally:
        if exchange is not None and known:
            exchange(before, None)


class DelayedSignals:
    """Defers SIGINT and SIGTERM until :meth:`deliver` is called; a second signal takes effect at once.

    Outside the main thread, where Python has no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    if signal.getsignal(number) not in (None, signal.SIG_IGN):
                        self._before[number] = signal.signal(number, self._note)
            except BaseException:  # one of them came just now
                self._restore()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()
        if kind is None:
            self.deliver()

    def deliver(self) -> None:
        """Deliver a deferred signal, if there is one."""
        number, self.noted = self.noted, None
        if number is not None:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        if self._before:
            number, handler = self._before.popitem()
            try:
                signal.signal(number, handler)  # which may let a signal that came just now take effect
            finally:
                self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        again = self.noted is not None
        self.noted = number
        if again:
            self.deliver()
