"""The record of an export: which tensor of the file is which of the model, and which model it came from.

It is made while the file is written, returned by ``export`` and stored in the file; ``verify`` reads it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from bitwright.errors import VerifyError
from bitwright.exporting.fingerprint import Fingerprint

SCHEMA = 1

# Why a file has no tensor for a quantizer; except for the last reason it needs none.
CONSTANT = "its tensor is a constant: the file stores the result"
REPEATED = "its values are those of the quantizers before it, in the same steps"
UNREAD = "nothing in the file reads its tensor"
NOT_CALLED = "the model did not call it when it was exported"


@dataclass(frozen=True)
class ExportedTensor:
    """Where the file holds the result of one call of a quantizer.

    Attributes:
        quantizer: the qualified name of the quantizer in the model.
        call: which of its calls in one run of the model, from 0.
        name: the user's name for the tensor.
        kind: ``activation`` if it is computed, ``weight`` if it is stored.
        spec: how it is quantized.
        tensor: the file's tensor of its integers (or fp8 numbers); empty if the file has none.
        shift: added to each integer in the file: 128 if int8 is written as uint8.
        reason: why the file has no such tensor.
        phases: the groups and strides of a transposed convolution whose weight is stored as that of a convolution.
    """

    quantizer: str
    call: int
    name: str
    kind: Literal["activation", "weight"]
    spec: str
    tensor: str = ""
    shift: int = 0
    reason: str = ""
    phases: tuple[int, ...] = ()

    @property
    def excused(self) -> bool:
        """Whether the file needs no such tensor."""
        return self.reason in (CONSTANT, REPEATED, UNREAD)


@dataclass(frozen=True)
class ExportedOperator:
    """The origin of an operator of the file.

    Attributes:
        node: its name in the file.
        name: the user's module, or the node of the model's graph.
        operator: Bitwright's name for the operator; empty if unknown.
    """

    node: str
    name: str
    operator: str = ""


@dataclass(frozen=True)
class ExportRecord:
    """What a file says about itself.

    Attributes:
        format: the name of its format.
        model: the class of the model.
        quantized: False for the float model, written for comparison.
        fingerprint: of the model that was exported.
        inputs: the model's arguments for the file's inputs, in order.
        tensors: the quantized tensors.
        operators: the operators.
        external: whether its large tensors are in a second file.
        making: what it was written with (see ``making.py``); None in files of older versions.
        schema: the version of this record.
    """

    format: str
    model: str
    quantized: bool
    fingerprint: Fingerprint
    inputs: tuple[str, ...] = ()
    tensors: tuple[ExportedTensor, ...] = ()
    operators: tuple[ExportedOperator, ...] = ()
    external: bool = False
    making: Mapping[str, Any] | None = None
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The record as text that ``from_json`` reads."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ExportRecord":
        """Read a record, or say what is wrong with it."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise VerifyError(f"its record has version {data['schema']}, not {SCHEMA}: export again")
            tensors = tuple(map(_read_tensor, data.pop("tensors")))
            operators = tuple(_read(ExportedOperator, o) for o in data.pop("operators"))
            fingerprint = _read(Fingerprint, data.pop("fingerprint"))
            data["inputs"] = tuple(data["inputs"])
            return _read(cls, data | {"tensors": tensors, "operators": operators, "fingerprint": fingerprint})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VerifyError(f"the file's record cannot be read ({type(error).__name__}: {error})") from error


def _read(cls: type[Any], data: Mapping[str, Any]) -> Any:
    """Build a dataclass from plain data, whose values must have the types of its plain fields."""
    kinds = {"str": str, "int": int, "bool": bool}
    made = cls(**data)
    for each in fields(cls):
        wanted = kinds.get(getattr(each.type, "__name__", ""))
        if wanted is not None and type(getattr(made, each.name)) is not wanted:
            raise TypeError(f"{cls.__name__}.{each.name} is not a {wanted.__name__}")
    return made


def _read_tensor(data: Mapping[str, Any]) -> ExportedTensor:
    phases = tuple(data.get("phases", ()))
    if not all(type(count) is int and count > 0 for count in phases):
        raise ValueError(f"the phases of {data.get('name')!r} are not numbers above 0")
    return _read(ExportedTensor, {**data, "phases": phases})


def data_path(path: Path) -> Path:
    """The second file with the large tensors of an exported one, if it has one."""
    return path.with_name(f"{path.name}.data")


def checksums_of(files: Iterable[Path]) -> tuple[str, ...]:
    """The SHA-256 of files; empty for one that is not there."""
    found = []
    for path in files:
        if not path.is_file():
            found.append("")
            continue
        with path.open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return tuple(found)


@dataclass(frozen=True)
class ExportedFile(os.PathLike[str]):
    """An exported file: a path, and the record that the file also contains.

    It works wherever a path does: ``open(file)``, ``onnx.load(file)``, ``Path(file)``.

    Attributes:
        path: where it is.
        record: what was written.
        files: everything that was written: the file, and what the format puts beside it.
        checksums: of these files, as they were written.
    """

    path: Path
    record: ExportRecord = field(repr=False)
    files: tuple[Path, ...] = field(default=(), repr=False)
    checksums: tuple[str, ...] = field(default=(), repr=False)

    def is_unchanged(self) -> bool:
        """Whether the files are still what was written."""
        return bool(self.checksums) and self.checksums == checksums_of(self.files)

    @property
    def tensors(self) -> tuple[ExportedTensor, ...]:
        """The quantized tensors, and where they are in the file."""
        return self.record.tensors

    @property
    def operators(self) -> tuple[ExportedOperator, ...]:
        """The operators of the file, and what they came from."""
        return self.record.operators

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the model that was exported."""
        return self.record.fingerprint

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


_MOST = 100  # files that are remembered
_written: dict[Path, ExportedFile] = {}


def remember(file: ExportedFile) -> ExportedFile:
    """Keep what this process has written, for :func:`last_written`."""
    _written.pop(file.path.absolute(), None)
    _written[file.path.absolute()] = file
    for path in list(_written)[:-_MOST]:
        _written.pop(path, None)
    return file


def last_written(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """What this process wrote to a path last, which may have been changed since, or the path."""
    return path if isinstance(path, ExportedFile) else _written.get(Path(path).absolute(), path)
