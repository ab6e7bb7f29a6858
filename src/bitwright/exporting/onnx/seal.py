"""The seal of an ONNX file: its last bytes are a checksum of everything before them, so any change is found.

Protobuf messages can be concatenated: the file is the model, followed by a model with a single metadata entry. Every
reader of ONNX sees one model with one more entry.
"""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import onnx

from bitwright.errors import ExportError, VerifyError
from bitwright.exporting.onnx.external import LIMIT, move_out, stored_bytes
from bitwright.exporting.record import ExportRecord, data_path
from bitwright.files import atomic_write

KEY = "bitwright.checksum"
RECORD = "bitwright.record"  # the key of the record
DATA = "bitwright.data"  # the key of the checksum of the file with large tensors


def write_recorded(model: onnx.ModelProto, record: ExportRecord, path: Path, external: bool | None) -> ExportRecord:
    """Write a model with its record, whole or not at all.

    With ``external`` its large tensors go to a second file; with None, only if one file cannot hold it. The model has
    the checksum of that file, and is written last.
    """
    too_large = stored_bytes(model) > LIMIT
    if too_large and external is False:
        raise ExportError("the model is larger than the 2 GB that an ONNX file can hold: leave out external_data=False")
    record = replace(record, external=bool(external or too_large))
    beside, stale = data_path(path), _has_data(path)
    with atomic_write(path) as main, atomic_write(beside) if record.external else nullcontext() as data:
        if data is not None:
            with data.open("wb") as file:
                model.metadata_props.add(key=DATA, value=move_out(model, file, beside.name))
        model.metadata_props.add(key=RECORD, value=record.to_json())
        main.write_bytes(_sealed(model))
    if stale and not record.external:
        beside.unlink(missing_ok=True)
    return record


def _has_data(path: Path) -> bool:
    """Whether a Bitwright file exists here with its large tensors beside it, unchanged."""
    if not (path.is_file() and data_path(path).is_file()):
        return False
    try:
        metadata = {e.key: e.value for e in onnx.load(path, load_external_data=False).metadata_props}
        check_data(path, metadata[DATA])
    except Exception:  # whatever it is, it is not ours
        return False
    return True


def write_sealed(model: onnx.ModelProto, path: Path) -> None:
    """Write a model, whole or not at all, followed by its checksum."""
    with atomic_write(path) as partial:
        partial.write_bytes(_sealed(model))


def _sealed(model: onnx.ModelProto) -> bytes:
    for entry in [e for e in model.metadata_props if e.key == KEY]:
        model.metadata_props.remove(entry)
    content = model.SerializeToString()
    return content + _trailer(hashlib.sha256(content).hexdigest())


def check_data(path: Path, checksum: str) -> Path:
    """The second file with a model's large tensors, if it is the one written with it."""
    beside = data_path(path)
    if not beside.is_file():
        raise VerifyError(f"{beside.name}, which holds its large tensors, is missing")
    with beside.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != checksum:
        raise VerifyError(f"{beside.name} is not the file written with it; export again")
    return beside


def check_seal(data: bytes) -> bool:
    """Whether a file has a seal; raises if the content no longer matches it."""
    size = len(_trailer("0" * 64))
    content, end = data[:-size], data[-size:]
    if end == _trailer(hashlib.sha256(content).hexdigest()):
        return True
    if KEY.encode() in data[-2 * size :]:
        raise VerifyError("it was changed after Bitwright wrote it: its checksum does not fit; export again")
    return False


def _trailer(checksum: str) -> bytes:
    entry = onnx.ModelProto()
    entry.metadata_props.add(key=KEY, value=checksum)
    return entry.SerializeToString()
