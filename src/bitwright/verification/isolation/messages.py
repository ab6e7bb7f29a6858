"""Messages between this process and a child: JSON and raw arrays through a socket. Nothing is pickled."""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_HEAD = struct.Struct("<Q")


def send(to: socket.socket, message: Mapping[str, Any], blobs: Sequence[Any] = ()) -> None:
    """Send plain data, followed by bytes or arrays."""
    views = [memoryview(b).cast("B") if isinstance(b, bytes) else _bytes_of(b) for b in blobs]
    text = json.dumps({**message, "sizes": [len(view) for view in views]}).encode()
    to.sendall(_HEAD.pack(len(text)) + text)
    for view in views:
        to.sendall(view)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[bytearray]]:
    """Wait for a message; EOFError if the other side is gone."""
    (size,) = _HEAD.unpack(_read(source, _HEAD.size))
    message = json.loads(_read(source, size))
    return message, [_read(source, n) for n in message.pop("sizes")]


def describe(arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Names, types and shapes, for JSON."""
    return [[name, value.dtype.name, list(value.shape)] for name, value in arrays.items()]


def restore(described: Sequence[Sequence[Any]], blobs: Sequence[bytearray]) -> dict[str, np.ndarray]:
    """The arrays that were described, from their bytes."""
    return {
        name: np.frombuffer(blob, _type(kind)).reshape(shape)
        for (name, kind, shape), blob in zip(described, blobs, strict=True)
    }


def _type(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16, int4 and their like
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = source.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
