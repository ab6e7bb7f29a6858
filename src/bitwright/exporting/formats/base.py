"""ExportFormat: how a model is written and read again. A new one is one file with ``@register_format``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from bitwright.errors import ConfigError, require
from bitwright.exporting.deploy import Deployment
from bitwright.exporting.record import ExportRecord
from bitwright.exporting.sizes import WishedSizes
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs
from bitwright.registry import Registry, check_class

FORMATS: Registry[type["ExportFormat"]] = Registry(
    "format", lambda cls: check_class(cls, ExportFormat, {"__init__": ()}, "bitwright/exporting/formats/base.py")
)


@dataclass(frozen=True)
class ExportOptions:
    """How to write a file.

    Attributes:
        dynamic_shapes: which input sizes are free: True for all that the model accepts, False, or as in
            ``torch.export``.
        unsigned_activations: write int8 activations as uint8, shifted by 128.
        input_names: names of the file's inputs; None for those of the model's arguments.
        output_names: names of the file's outputs; None for those of the model's results.
        opset_version: of ONNX; None for the lowest that can express the model.
        model_name: name of the model in the file; None for the name of its class.
        external_data: store large tensors in a second file; None does so above the 2 GB that one file can hold.
        pack_weights: store weights of at most 4 bits in 4 bits, not in bytes.
        store_half: store float constants in half precision where that is exact.
    """

    dynamic_shapes: Any = True
    unsigned_activations: bool = False
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    opset_version: int | None = None
    model_name: str | None = None
    external_data: bool | None = None
    pack_weights: bool = False
    store_half: bool = False

    def __post_init__(self) -> None:
        for key in ("input_names", "output_names"):
            _check_names(key, getattr(self, key))
        both = set(self.input_names or ()) & set(self.output_names or ())
        if both:
            raise ConfigError(f"{min(both)!r} is in input_names and in output_names: a name must stand for one tensor")
        version = self.opset_version
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise ConfigError(f"opset_version must be a whole number, not {version!r}")
        if self.model_name is not None and (not isinstance(self.model_name, str) or not self.model_name):
            raise ConfigError(f"model_name must be a name, not {self.model_name!r}")
        if self.external_data not in (None, True, False):
            raise ConfigError(f"external_data must be True, False or None, not {self.external_data!r}")


def _check_names(key: str, names: object) -> None:
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{key} must be a list of names, not {names!r}")
    for place, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{key} must be names, and {name!r} is not one")
        if name in names[:place]:
            raise ConfigError(f"{key} has {name!r} twice: every tensor needs its own name")


def check_count(kind: str, names: Sequence[str], has: Sequence[str]) -> None:
    """Refuse names of inputs or outputs that are more, or fewer, than a model has."""
    if len(names) != len(has):
        count = f"{len(has)} {kind}{'' if len(has) == 1 else 's'} ({', '.join(map(repr, has))})"
        raise ConfigError(f"{kind}_names has {len(names)} names, and the model has {count}")


@dataclass(frozen=True)
class FileNode:
    """An operator of a file: its name, its type, and the tensors that it reads and writes."""

    name: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class LoadedFile(ABC):
    """A file that was read.

    Attributes:
        path: where it is.
        size: its size in bytes.
        record: Bitwright's record of it; None if Bitwright did not write it.
        inputs: the names of its inputs.
        outputs: the names of its outputs, in order.
        format: the format that a runtime must support to run it.
        stands_in: whether it was rebuilt here from what the target's tools read; then only its values count, not a
            runtime's kernels and speed.
    """

    path: Path
    size: int
    record: ExportRecord | None
    inputs: list[str]
    outputs: list[str]
    format: str = "onnx"
    stands_in: bool = False

    @abstractmethod
    def shipped(self) -> dict[str, bytes]:
        """What runtimes load: the contents of its files by name, the main one first."""

    @abstractmethod
    def watching(self, tensors: Iterable[str]) -> "LoadedFile":
        """The same model with the named tensors as further outputs."""

    def beginning(self, count: int) -> "LoadedFile | None":
        """Only the first operators, which output what is read later; None if the format cannot be cut."""
        return None

    def output_of(self, tensor: str) -> str:
        """The name of the output with a watched tensor."""
        return tensor

    def batched(self) -> list[str]:
        """The inputs whose first size is free; none for a format that cannot tell."""
        return []

    @abstractmethod
    def float_twin(self) -> "LoadedFile":
        """The same network in FP32: without quantizers, weights dequantized."""

    @abstractmethod
    def nodes(self) -> "list[FileNode]":
        """The operators, in the order in which they are computed."""

    @abstractmethod
    def multiply_adds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, int | None]:
        """The number of multiplications and additions of each layer and product on these inputs; None if unknown."""

    @abstractmethod
    def constant(self, tensor: str) -> np.ndarray | None:
        """The values of a stored tensor; None if the file stores no such tensor."""

    def contents(self) -> dict[str, str] | None:
        """Digests of all that decides what the file computes, by what it is; None if the format cannot tell.

        Two files of one model, written alike by the same versions, have equal contents.
        """
        return None

    def with_quantizers(self) -> Any:
        """The model as ONNX with each quantizer as an operator; None for a format that is not ONNX."""
        return None


class ExportFormat(ABC):
    """A way to write models.

    Attributes:
        name: its name for users and backends.
        suffix: suffix of its files.
        packages: packages it needs, as ``{package: extra of Bitwright}``.
        clean: whether it is for tools that quantize a float model themselves, so that nothing is added for a runtime:
            activations stay where quantizers imply them, and there are no guards.
        checkable: whether constraints can see its files, which they do as ONNX.
    """

    name: ClassVar[str] = ""
    suffix: ClassVar[str] = ""
    packages: ClassVar[dict[str, str]] = {}
    clean: ClassVar[bool] = False
    checkable: ClassVar[bool] = True

    def __init__(self) -> None:
        for package, extra in self.packages.items():
            require(package, extra, f"the format {self.name}")

    def check(self, model: nn.Module, inputs: Inputs, options: ExportOptions) -> None:
        """Refuse options that the format, or a model with these inputs, cannot support; called before any work."""
        if options.input_names is not None:
            check_count("input", options.input_names, list(flat_inputs(model, inputs)))
        if not isinstance(options.dynamic_shapes, bool):
            WishedSizes(model, inputs, options.dynamic_shapes)
        if options.opset_version is not None and "onnxscript" in self.packages:
            from bitwright.exporting.onnx.opset import check_opset

            check_opset(options.opset_version)

    @abstractmethod
    def write(self, deployment: Deployment, inputs: Inputs, target: Path, options: ExportOptions) -> ExportRecord:
        """Write a deployed model as ``target``, which appears whole or not at all."""

    @abstractmethod
    def read(self, path: Path) -> LoadedFile:
        """Read a file, or raise a VerifyError that says why not."""

    def restore(self, file: Any) -> LoadedFile:
        """The file, after ``onnx`` has read it, for formats whose files are also ONNX and name this format."""
        return file

    def files(self, target: Path) -> list[Path]:
        """The files that ``write`` makes."""
        return [target]


def register_format(name: str, *, override: bool = False) -> Callable[[type[ExportFormat]], type[ExportFormat]]:
    """File a format under a name.

    A format derives from :class:`ExportFormat`; a backend names the formats that its target reads, the first by
    default, and a runtime the formats that it executes.
    """
    return FORMATS.register(name, override=override)


def format_of(path: Path, default: str = "onnx") -> ExportFormat:
    """The format of a file, by how its name ends, or else the default."""
    known = {FORMATS.get(name).suffix: name for name in FORMATS} | {".onnx": "onnx"}  # reads all that is ONNX
    return FORMATS.get(known.get(path.suffix, default))()
