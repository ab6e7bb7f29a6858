"""BundleFormat: a float ONNX model beside files of ranges. A new one is one small file in ``exporting/formats/``.

The ONNX file carries the record and the checksums of the files beside it. To prove a bundle, both are read back, and
the Q/DQ model that they describe is rebuilt from them, with the numbers of the file of ranges.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bitwright.errors import BitwrightError, ConfigError, ExportError, VerifyError, useful_line
from bitwright.exporting.bundles.ranges import Kind, Place, Range
from bitwright.exporting.bundles.schema import problems, schema_named
from bitwright.exporting.deploy import Deployment
from bitwright.exporting.formats.base import ExportFormat, ExportOptions, LoadedFile
from bitwright.exporting.record import ExportRecord
from bitwright.files import atomic_write
from bitwright.graph import Inputs

if TYPE_CHECKING:
    import onnx

    from bitwright.exporting.bundles.split import Split

BUNDLE = "bitwright.bundle"  # the key of places and checksums in the float model's metadata
Texts = dict[str, str]


@dataclass(frozen=True)
class Contents:
    """The float model of a bundle, where its quantized tensors are, and their numbers (none while it is read)."""

    model: "onnx.ModelProto"
    places: tuple[Place, ...]
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """The constants of the float model."""
        from onnx import numpy_helper

        return {i.name: numpy_helper.to_array(i) for i in self.model.graph.initializer}

    @property
    def inputs(self) -> set[str]:
        """The names of the float model's inputs."""
        return {i.name for i in self.model.graph.input}

    def of(self, *kinds: Kind) -> list[Range]:
        """The ranges of some kinds of tensors, in the order of the model."""
        return [self.ranges[p.tensor] for p in self.places if p.kind in kinds]

    def place(self, tensor: str, where: str) -> Place:
        """The place of a tensor that a file of ranges names."""
        found = next((p for p in self.places if p.tensor == tensor), None)
        if found is None:
            raise VerifyError(f"{where} names {tensor!r}, which the model beside it does not quantize")
        return found


class BundleFormat(ExportFormat):
    """A float ONNX model beside files of ranges.

    Attributes:
        sides: the suffixes of the files of ranges, instead of the model's ``.onnx``.
        holds: the kinds of tensors that they hold.
        schema: the name of the JSON Schema of the (first) file; empty if it is not JSON.
        limits: what the format can express, in words, for the documentation.
    """

    suffix = ".onnx"
    packages: ClassVar[dict[str, str]] = {"onnx": "onnx", "onnxscript": "onnx"}
    clean = True
    sides: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[tuple[Kind, ...]] = ("activation", "weight")
    schema: ClassVar[str] = ""
    limits: ClassVar[str] = ""

    @abstractmethod
    def texts(self, contents: Contents) -> Texts:
        """The texts of the files of ranges, by suffix."""

    @abstractmethod
    def ranges(self, texts: Texts, contents: Contents) -> list[Range]:
        """Read the texts as the target's tools do, and return the range of every weight and activation."""

    def split(self, proto: "onnx.ModelProto", record: ExportRecord) -> "Split":
        """The float model and the ranges of a Q/DQ model."""
        from bitwright.exporting.bundles.split import split

        return split(proto, record)

    def join(self, proto: "onnx.ModelProto", ranges: list[Range]) -> "onnx.ModelProto":
        """The Q/DQ model of a float model and ranges."""
        from bitwright.exporting.bundles.join import join

        return join(proto, ranges)

    def why_not(self, found: Range) -> str | None:
        """Why the format cannot hold a range; None if it can."""
        return None

    def files(self, target: Path) -> list[Path]:
        beside = [target.with_suffix(suffix) for suffix in self.sides]
        if target in beside:
            raise ConfigError(f"{target.name!r} is the name of the file of ranges: call the model {target.stem!r}.onnx")
        return [target, *beside]

    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        """Write the files of ranges, then the model, which holds their checksums."""
        from bitwright.exporting.formats.onnx import build, check_valid
        from bitwright.exporting.onnx.seal import write_recorded

        proto, record = build(deployment, inputs, options, self.name)
        parts = self.split(proto, record)
        contents = Contents(parts.model, tuple(r.place for r in parts.ranges.values()), parts.ranges)
        self._check(contents)
        texts = self.texts(contents)
        self.checked(texts, contents)
        check_valid(parts.model, "the float model")
        sums = {suffix: _checksum(text.encode()) for suffix, text in texts.items()}
        note = {"places": [asdict(p) for p in contents.places], "checksums": sums}
        parts.model.metadata_props.add(key=BUNDLE, value=json.dumps(note, separators=(",", ":")))
        with ExitStack() as stack:
            for suffix, path in zip(self.sides, self.files(target)[1:], strict=True):
                stack.enter_context(atomic_write(path)).write_bytes(texts[suffix].encode())
            return write_recorded(parts.model, record, target, options.external_data)

    def read(self, path: Path) -> LoadedFile:
        from bitwright.exporting.onnx.file import OnnxFile

        if any(path.name.endswith(suffix) for suffix in self.sides):
            raise VerifyError(f"{str(path)!r} holds the ranges; name the .onnx file beside it")
        return self.restore(OnnxFile.read(path))

    def restore(self, file: Any) -> LoadedFile:
        from bitwright.exporting.bundles.file import BundleFile

        note = next((e.value for e in file.proto.metadata_props if e.key == BUNDLE), None)
        if note is None:
            raise VerifyError(
                f"{str(file.path)!r} is not a bundle of {self.name}: it does not name the files beside it"
            )
        beside = self.files(file.path)[1:]
        try:
            data = json.loads(note)
            places = tuple(Place.from_json(p) for p in data["places"])
            sums = [str(data["checksums"][suffix]) for suffix in self.sides]
            texts = {s: _beside(p, file.path, c) for s, p, c in zip(self.sides, beside, sums, strict=True)}
            joined = self.join(file.proto, self.checked(texts, Contents(file.proto, places)))
        except BitwrightError:
            raise
        except Exception as error:  # the files contradict themselves in an unforeseen way
            why = f"{type(error).__name__}: {useful_line(error)}"
            raise VerifyError(
                f"{str(file.path)!r} and the files beside it do not match ({why}); export again"
            ) from error
        return BundleFile(file, joined, [file.path, *beside])

    def checked(self, texts: Texts, contents: Contents) -> list[Range]:
        """The ranges from the texts, after checking the schema and what all bundles must have."""
        found = self.ranges(texts, contents)
        given = {r.place.tensor for r in found}
        missing = [p.tensor for p in contents.places if p.tensor not in given and p.kind != "bias"]
        if missing:
            raise VerifyError(f"the file of ranges has none for {missing[0]!r}")
        for r in found:
            _check_numbers(r)
        return found

    def parsed(self, text: str, schema: str = "") -> Any:
        """JSON that fits the schema, or a VerifyError."""
        name = schema or self.schema
        try:
            data = json.loads(text)
        except ValueError as error:
            raise VerifyError(f"the file of ranges is not JSON: {error}") from error
        if wrong := problems(data, schema_named(name)):
            raise VerifyError(f"the file of ranges does not fit the schema {name}: {'; '.join(wrong[:3])}")
        return data

    def _check(self, contents: Contents) -> None:
        refused = [
            f"{tensor}: {why}"
            for tensor, r in contents.ranges.items()
            if r.place.kind != "bias" and (why := self.why_not(r)) is not None
        ]
        if refused:
            more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise ExportError(f"the format {self.name} cannot express {'; '.join(refused[:3])}{more}")


def _check_numbers(found: Range) -> None:
    place, points = found.place, found.zero_point
    of = f"the file of ranges has for {place.tensor!r}"
    if not (np.isfinite(found.scale).all() and (found.scale > 0).all()):
        raise VerifyError(f"{of} a scale that is not positive")
    if (found.scale.shape, points.shape) != (place.shape, place.shape):
        shapes = f"scales {list(found.scale.shape)} and zero points {list(points.shape)}"
        raise VerifyError(f"{of} {shapes}, not {list(place.shape)}")
    if place.kind != "bias" and ((points < place.lowest) | (points > place.highest)).any():
        raise VerifyError(f"{of} a zero point that {place.bits} bits do not hold")


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _beside(path: Path, model: Path, checksum: str) -> str:
    """The text of a file of ranges, which must be the one written with the model."""
    if not path.is_file():
        raise VerifyError(f"{str(path)!r} is missing: {model.name} was written with it, and is incomplete without it")
    data = path.read_bytes()
    if _checksum(data) != checksum:
        raise VerifyError(
            f"{str(path)!r} cannot be trusted: it was changed after Bitwright wrote it, or belongs to a model other "
            f"than {model.name}; export again"
        )
    return data.decode()
