"""A file of a ``torch.export`` program: a zip archive with the record and a checksum of all else in it."""

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from bitwright.errors import VerifyError, useful_line
from bitwright.exporting.contents import Contents
from bitwright.exporting.formats.base import FileNode, LoadedFile
from bitwright.exporting.record import ExportRecord
from bitwright.files import atomic_write
from bitwright.torch_internals import decomposed_quantizers

RECORD, ORIGIN, SEAL = "bitwright.record", "bitwright.origin", "bitwright.checksum"
_UNSEALED = (f"extra/{SEAL}", ".data/serialization_id")  # the second is torch's own checksum, of the first as well
_ORIGINS = ("stack_trace", "from_node")  # of nodes: lines of Python, and numbers of objects in memory
_WORK = {"conv1d": 2, "conv2d": 2, "conv3d": 2, "conv_transpose1d": 0, "conv_transpose2d": 0, "linear": 1, "matmul": 1}


def write_sealed(program: object, record: ExportRecord, origin: dict[str, Any], path: Path) -> None:
    """Write a program, whole or not at all, with a checksum of all else in the archive."""
    extra = {RECORD: record.to_json(), ORIGIN: json.dumps(origin, separators=(",", ":"))}
    content = _saved(program, {**extra, SEAL: ""})
    sealed = _saved(program, {**extra, SEAL: _digest(zipfile.ZipFile(io.BytesIO(content)))})
    with atomic_write(path) as partial:
        partial.write_bytes(sealed)


def _saved(program: Any, extra: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=extra)
    return buffer.getvalue()


def _digest(archive: zipfile.ZipFile) -> str:
    digest = hashlib.sha256()
    for name in sorted(archive.namelist()):
        if not name.endswith(_UNSEALED):
            digest.update(f"{name}\0{hashlib.sha256(archive.read(name)).hexdigest()}\n".encode())
    return digest.hexdigest()


def load_program(content: bytes) -> Any:
    """The program in an archive; one that would have to be unpickled is refused."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    for name in archive.namelist():
        if name.endswith("_config.json") and b'"use_pickle": true' in archive.read(name):
            raise VerifyError(f"{name} needs pickled tensors, which are not read")
        if "/sample_inputs/" in name:  # torch itself would go on without the limits that this sets
            torch.load(io.BytesIO(archive.read(name)), weights_only=True)
    decomposed_quantizers()
    return torch.export.load(io.BytesIO(content))


class ProgramFile(LoadedFile):
    """A program in memory.

    Attributes:
        how: what runtimes do with it first: which tensors to give out, too, and whether to leave out quantizers.
    """

    format = "torch"

    def __init__(
        self, path: Path, content: bytes, record: ExportRecord | None, origin: dict[str, Any], how: dict[str, Any]
    ) -> None:
        self.path, self.content, self.record, self.how, self._origin = path, content, record, how, origin
        self.inputs, self.outputs, self.size = origin["inputs"], [*origin["outputs"], *how["watch"]], len(content)

    @classmethod
    def read(cls, path: Path) -> "ProgramFile":
        """Read a file that Bitwright wrote, and that is as it was written."""
        if not path.is_file():
            raise VerifyError(f"there is no file {str(path)!r}; export the model first")
        content = path.read_bytes()
        try:
            archive = zipfile.ZipFile(io.BytesIO(content))
            found = {n.rpartition("extra/")[2]: archive.read(n) for n in archive.namelist() if "/extra/" in n}
            intact = RECORD in found and _digest(archive) == found.get(SEAL, b"").decode()
        except Exception as error:  # broken archives make zipfile raise errors of many kinds
            raise _not_whole(path, error) from error
        if RECORD not in found and RECORD.encode() not in content:
            raise VerifyError(f"{str(path)!r} was not written by Bitwright: it has no record")
        if not intact:
            raise VerifyError(f"{str(path)!r} cannot be trusted: it was changed after Bitwright wrote it; export again")
        try:
            record, origin = ExportRecord.from_json(found[RECORD].decode()), json.loads(found[ORIGIN])
            return cls(path, content, record, origin, {"watch": [], "float": False})
        except (ValueError, KeyError, TypeError) as error:
            raise _not_whole(path, error) from error

    @cached_property
    def program(self) -> Any:
        """The program."""
        try:
            return load_program(self.content)
        except VerifyError:
            raise
        except Exception as error:  # whatever torch says of what is in the archive
            raise _not_whole(self.path, error) from error

    def shipped(self) -> dict[str, bytes]:
        """The archive, and what to do with it."""
        return {"model.pt2": self.content, "how.json": json.dumps(self.how).encode()}

    def contents(self) -> dict[str, str]:
        """Digests of the program, without where its lines come from, and of its tensors."""
        found, archive = Contents(), zipfile.ZipFile(io.BytesIO(self.content))
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("models/model.json"):
                _add_program(json.loads(content), found)
            elif not name.endswith((*_UNSEALED, f"extra/{RECORD}")) and "/sample_inputs/" not in name:
                found.add(f"the member {name}", content)
        return found.digests

    def watching(self, tensors: Iterable[str]) -> "ProgramFile":
        known = {node.name for node in self.nodes()}
        watch = [name for name in dict.fromkeys(tensors) if name in known]
        return ProgramFile(self.path, self.content, self.record, self._origin, {**self.how, "watch": watch})

    def float_twin(self) -> "ProgramFile":
        twin = ProgramFile(self.path, self.content, None, self._origin, {"watch": [], "float": True})
        state = [*self.program.state_dict.items(), *self.program.constants.items()]
        twin.size = sum(4 * t.numel() for name, t in state if name.endswith((".integers", ".values")))
        return twin

    def nodes(self) -> list[FileNode]:
        return [FileNode(name, kind, tuple(i), tuple(o)) for name, kind, i, o in self._origin["nodes"]]

    def multiply_adds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, int | None]:
        """Count them by the shapes that a run has."""
        counter = _Counter(self.program.module())
        with torch.no_grad():
            counter.run(*(torch.from_numpy(feeds[name]) for name in self.inputs), enable_io_processing=False)
        return counter.counts

    def constant(self, tensor: str) -> np.ndarray | None:
        found = {**self.program.state_dict, **self.program.constants}.get(tensor)
        return None if found is None else found.numpy()


def _add_program(program: dict[str, Any], found: Contents) -> None:
    for node in program["graph_module"]["graph"].pop("nodes"):
        node["metadata"] = {k: v for k, v in node["metadata"].items() if k not in _ORIGINS}
        found.add(f"the operator {node.get('name') or node['target']}", json.dumps(node, sort_keys=True))
    found.add("the rest of the program", json.dumps(program, sort_keys=True))


def _not_whole(path: Path, error: Exception) -> VerifyError:
    return VerifyError(f"{str(path)!r} is not a complete program of torch.export: {useful_line(error)}")


class _Counter(fx.Interpreter):
    """Runs a program and counts the multiplications and additions of each layer and product."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.counts: dict[str, int | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module" and n.name.startswith("_guards"):  # it checks sizes only
            return None
        result = super().run_node(n)
        kind = str(getattr(n.target, "__name__", "")).partition(".")[0]
        if n.op == "call_function" and kind in _WORK:
            args, _ = self.fetch_args_kwargs_from_env(n)
            x, weight = args[0].shape, args[1].shape
            inner = {2: math.prod(weight[1:]), 1: x[-1], 0: math.prod(weight[1:])}[_WORK[kind]]
            self.counts[n.name] = inner * math.prod(x if _WORK[kind] == 0 else result.shape)
        return result
