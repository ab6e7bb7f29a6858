"""Silence the exporter in its own thread: its remarks are about itself, and what concerns the user is raised.

Nothing of the process is redirected for a while and then restored, which another thread could undo in the wrong order.
What is installed stays, and lets pass whatever threads say that do not export.
"""

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from bitwright.modes import ForkableLock
from bitwright.torch_internals import keep_onnx_functions, mute_failed_graphs

_SPEAKERS = ("torch", "onnxscript", "onnx_ir")
_EARLY = "torch.onnx._internal.exporter._registration"  # speaks before its module has been imported by anything else
_thread = threading.local()
_one_at_a_time = ForkableLock()


def _exporting() -> bool:
    return getattr(_thread, "exporting", False)


class _MuteLog(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _exporting()


class _MuteWarnings:
    """Shows warnings as before, but not those of a thread that exports."""

    def __init__(self) -> None:
        self.show = warnings.showwarning

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not _exporting():
            self.show(*args, **kwargs)


_mute_log = _MuteLog()


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Let one thread at a time export, and say nothing meanwhile."""
    with _one_at_a_time.now:
        names = [n for n in (*logging.root.manager.loggerDict, _EARLY) if n.partition(".")[0] in _SPEAKERS]
        for name in names:
            logging.getLogger(name).addFilter(_mute_log)
        if not isinstance(warnings.showwarning, _MuteWarnings):
            warnings.showwarning = _MuteWarnings()
        mute_failed_graphs(_exporting)
        keep_onnx_functions(_exporting)
        _thread.exporting = True
        try:
            yield
        finally:
            _thread.exporting = False
