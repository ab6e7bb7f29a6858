"""Silence the exporter in its own thread: its messages are about itself, and what concerns the user is raised.

Nothing process-wide is temporarily redirected, because another thread could restore it in the wrong order. The filters
stay installed, and let through everything from threads that do not export.
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
_EARLY = "torch.onnx._internal.exporter._registration"  # speaks before anything else imports its module
_thread = threading.local()
_one_at_a_time = ForkableLock()


def _exporting() -> bool:
    return getattr(_thread, "exporting", False)


class _MuteLog(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _exporting()


class _MuteWarnings:
    """Shows warnings as before, except those of a thread that exports."""

    def __init__(self) -> None:
        self.show = warnings.showwarning

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not _exporting():
            self.show(*args, **kwargs)


_mute_log = _MuteLog()


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Make one thread at a time export, silently."""
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
