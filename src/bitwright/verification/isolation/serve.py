"""What runs in the child: ``python -m bitwright.verification.isolation.serve FD MODULE CLASS``. It needs no torch."""

import importlib
import signal
import socket
import sys
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import astuple
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bitwright.verification.isolation.memory import peak_of
from bitwright.verification.isolation.messages import describe, receive, restore, send

if TYPE_CHECKING:
    import onnx

    from bitwright.verification.runtimes.base import Runtime, Session

_Node = namedtuple("_Node", "name type inputs outputs")


class ShippedFile:
    """A file received as bytes, the main part first, with as much of the interface as runtimes need."""

    def __init__(self, description: dict[str, Any], contents: Iterable[bytes]) -> None:
        self.parts = dict(zip(description["names"], contents, strict=True))
        self.outputs: list[str] = description["outputs"]
        self._nodes = description["nodes"]

    def shipped(self) -> dict[str, bytes]:
        """Its contents."""
        return self.parts

    @cached_property
    def proto(self) -> "onnx.ModelProto":
        """The model of an ONNX file, without large tensors if these came separately."""
        import onnx

        return onnx.load_model_from_string(next(iter(self.parts.values())))

    def nodes(self) -> list[_Node]:
        """The operators."""
        return [_Node(name, kind, tuple(inputs), tuple(outputs)) for name, kind, inputs, outputs in self._nodes]


class _Server:
    def __init__(self, runtime: "Runtime") -> None:
        self.runtime = runtime
        self.sessions: dict[int, Session] = {}

    def answer(self, ask: dict[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[Any]]:
        """Execute one request."""
        for number in ask["drop"]:
            self.sessions.pop(number, None)
        rest = iter(blobs)
        files = [ShippedFile(d, (bytes(next(rest)) for _ in d["names"])) for d in ask["files"]]
        feeds = restore(ask["arrays"], list(rest))
        settings = ask["settings"]
        if ask["do"] == "session":
            self.sessions[ask["number"]] = self.runtime.session(files[0], **settings)
        elif ask["do"] == "run":
            results = self.runtime.checked(self.sessions[ask["number"]](feeds))
            return {"arrays": describe(results)}, list(results.values())
        elif ask["do"] == "executed":
            return {"executed": [astuple(e) for e in self.runtime.executed(files[0], feeds)]}, []
        elif ask["do"] == "peak_memory":
            self.runtime.version  # noqa: B018  (loads the package, which is not the file's)
            return {"bytes": peak_of(lambda: self.runtime.session(files[0], threads=1)(feeds))}, []
        elif ask["do"] == "best_times":
            return {"times": self.runtime.best_times(files, feeds, **settings)}, []
        return {}, []


def main(number: str, module: str, name: str) -> None:
    """Serve requests until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; when it ends, so do we
    server = _Server(getattr(importlib.import_module(module), name)())
    with socket.socket(fileno=int(number)) as parent:
        send(parent, {})
        while True:
            try:
                ask, blobs = receive(parent)
            except (EOFError, ConnectionError):
                return
            try:
                message, arrays = server.answer(ask, blobs)
            except Exception as error:
                message, arrays = {"error": server.runtime.words_of(error)}, []
            send(parent, message, arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
