"""The parent's side: a child process that executes files, and what is known if it dies."""

import atexit
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.errors import VerifyError
from bitwright.verification.isolation.messages import describe, receive, restore, send

if TYPE_CHECKING:
    from bitwright.verification.runtimes.base import Arrays, Executed, Runtime

_START = 120.0  # seconds in which a child must start
_children: dict[tuple[str, str], "Child"] = {}


class RuntimeDied(VerifyError):
    """A runtime crashed, or did not answer in time."""


def child_of(runtime: "Runtime") -> "Child":
    """The child process for this class of runtimes, started on first use."""
    kind = type(runtime)
    key = (kind.__module__, kind.__qualname__)
    if key not in _children:
        _children[key] = Child(*key)
        atexit.register(_children[key].end)
    return _children[key]


class Child:
    """A process that executes files with one runtime; if it dies, the next call starts another."""

    def __init__(self, module: str, name: str) -> None:
        self._command = [sys.executable, "-m", "bitwright.verification.isolation.serve"]
        self._class = [module, name]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._said: Any = None
        self._owner = 0
        self._numbers = itertools.count(1)  # one for each session, whichever thread asks
        self._dropped: list[int] = []

    def session(self, file: object, timeout: float, **settings: object) -> "RemoteSession":
        """Load a file."""
        number = next(self._numbers)
        self._ask("session", timeout, [file], number=number, settings=settings)
        return RemoteSession(self, number, self._process, timeout)

    def executed(self, file: object, feeds: Mapping[str, np.ndarray], timeout: float) -> "list[Executed]":
        """Tell what is executed."""
        from bitwright.verification.runtimes.base import Executed

        found = self._ask("executed", timeout, [file], feeds)[0]["executed"]
        return [Executed(a, b, c, tuple(nodes), time) for a, b, c, nodes, time in found]

    def best_times(
        self, files: Sequence[Any], feeds: Mapping[str, np.ndarray], timeout: float, **settings: object
    ) -> list[float]:
        """Time files against each other."""
        return self._ask("best_times", timeout, files, feeds, settings=settings)[0]["times"]

    def peak_memory(self, file: object, feeds: Mapping[str, np.ndarray], timeout: float) -> int | None:
        """The peak number of bytes for loading and running a file."""
        return self._ask("peak_memory", timeout, [file], feeds)[0]["bytes"]

    def run(self, session: "RemoteSession", feeds: Mapping[str, np.ndarray]) -> "Arrays":
        """Run a file that was loaded."""
        if session.process is not self._process:
            raise RuntimeDied("the process that loaded the file is gone")
        answer, blobs = self._ask("run", session.timeout, (), feeds, number=session.number)
        return restore(answer["arrays"], blobs)

    def drop(self, number: int) -> None:
        """Release a session, with the next message."""
        self._dropped.append(number)

    def _ask(
        self,
        do: str,
        timeout: float,
        files: Sequence[Any],
        feeds: Mapping[str, np.ndarray] | None = None,
        **more: object,
    ) -> tuple[dict[str, Any], list[bytearray]]:
        feeds = feeds or {}
        contents = [f.shipped() for f in files]
        described = [
            {"names": list(parts), "outputs": f.outputs, "nodes": [astuple(n) for n in f.nodes()]}
            for f, parts in zip(files, contents, strict=True)
        ]
        message = {"do": do, "files": described, "arrays": describe(feeds), "settings": {}, **more}
        blobs = [*(part for parts in contents for part in parts.values()), *feeds.values()]
        with self._lock:
            dropped, self._dropped = self._dropped, []
            try:
                channel = self._start()
                channel.settimeout(timeout)
                send(channel, {**message, "drop": dropped}, blobs)
                answer, arrays = receive(channel)
            except BaseException as error:  # also Ctrl-C, which leaves half a message
                words = f"does not answer within {timeout:g} seconds"
                if isinstance(error, EOFError | ConnectionError):
                    words = self._last_words()
                self.end()
                if isinstance(error, EOFError | ConnectionError | TimeoutError):
                    raise RuntimeDied(words) from None
                raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer, arrays

    def _start(self) -> socket.socket:
        alive = self._process is not None and self._process.poll() is None and self._owner == os.getpid()
        if alive and self._socket is not None:
            return self._socket
        self.end()
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *self._class],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )
        self._socket, self._owner = ours, os.getpid()
        ours.settimeout(_START)
        receive(ours)  # it reports that it is ready
        return ours

    def end(self) -> None:
        """End the process, if it runs."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        if self._said is not None:
            self._said.close()
        self._process = self._socket = self._said = None

    def _last_words(self) -> str:
        """How the process ended, and the last line it wrote."""
        code = self._process.wait() if self._process is not None else 0
        said = ""
        if self._said is not None:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            said = f" ({lines[-1][:200]})" if lines else ""
        if code >= 0:
            return f"ended with the exit code {code}{said}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        memory = ", as the system does to a process when memory runs out" if name == "SIGKILL" else ""
        return f"crashed with {name}{memory}{said}"


class RemoteSession:
    """A file loaded in a child, as a function from inputs to outputs."""

    def __init__(self, child: Child, number: int, process: object, timeout: float) -> None:
        self.child, self.number, self.process, self.timeout = child, number, process, timeout

    def __call__(self, feeds: "Mapping[str, np.ndarray]") -> "Arrays":
        return self.child.run(self, feeds)

    def __del__(self) -> None:
        self.child.drop(self.number)
