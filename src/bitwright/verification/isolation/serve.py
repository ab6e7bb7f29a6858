"""What runs in the child: ``python -m bitwright.verification.isolation.serve FD MODULE CLASS``. It needs no torch."""

import importlib
import signal
import socket
import sys
from collections import namedtuple
from dataclasses import astuple
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bitwright.verification.isolation.messages import describe, receive, restore, send

if TYPE_CHECKING:
    import onnx

    from bitwright.verification.runtimes.base import Runtime, Session

_Node = namedtuple("_Node", "name type inputs outputs")


class ShippedFile:
    """An ONNX file that came as bytes: as much of it as runtimes ask for."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def content(self) -> bytes:
        """The bytes."""
        return self._content

    @cached_property
    def proto(self) -> "onnx.ModelProto":
        """The model."""
        import onnx

        return onnx.load_model_from_string(self._content)

    @cached_property
    def outputs(self) -> list[str]:
        """The names of its outputs."""
        return [o.name for o in self.proto.graph.output]

    def nodes(self) -> list[_Node]:
        """The operators."""
        return [_Node(n.name, n.op_type, tuple(n.input), tuple(n.output)) for n in self.proto.graph.node]


class _Server:
    def __init__(self, runtime: "Runtime") -> None:
        self.runtime = runtime
        self.sessions: dict[int, Session] = {}

    def answer(self, ask: dict[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[Any]]:
        """Do what is asked for."""
        for number in ask["drop"]:
            self.sessions.pop(number, None)
        files = [ShippedFile(bytes(blob)) for blob in blobs[: ask["files"]]]
        feeds = restore(ask["arrays"], blobs[ask["files"] :])
        settings = ask["settings"]
        if ask["do"] == "session":
            self.sessions[ask["number"]] = self.runtime.session(files[0], **settings)
        elif ask["do"] == "run":
            results = self.runtime.checked(self.sessions[ask["number"]](feeds))
            return {"arrays": describe(results)}, list(results.values())
        elif ask["do"] == "executed":
            return {"executed": [astuple(e) for e in self.runtime.executed(files[0], feeds)]}, []
        elif ask["do"] == "best_times":
            return {"times": self.runtime.best_times(files, feeds, **settings)}, []
        return {}, []


def main(number: str, module: str, name: str) -> None:
    """Answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is ours
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
