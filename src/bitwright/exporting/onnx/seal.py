"""The seal of an ONNX file: its last bytes hold a checksum of all before them, so that any change is found.

Protobuf messages can be joined: the file is the model, followed by a model that has nothing but one entry of metadata.
Every reader of ONNX sees one model with one entry more.
"""

import hashlib
from pathlib import Path

import onnx

from bitwright.errors import VerifyError
from bitwright.files import atomic_write

KEY = "bitwright.checksum"


def write_sealed(model: onnx.ModelProto, path: Path) -> None:
    """Write a model, whole or not at all, followed by its checksum."""
    for entry in [e for e in model.metadata_props if e.key == KEY]:
        model.metadata_props.remove(entry)
    content = model.SerializeToString()
    with atomic_write(path) as partial:
        partial.write_bytes(content + _trailer(hashlib.sha256(content).hexdigest()))


def check_seal(data: bytes) -> bool:
    """Whether a file carries a seal; if it does and the content is not what was sealed, that is an error."""
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
