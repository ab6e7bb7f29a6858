"""Runtimes that execute an exported file on this machine. A new one is one file with ``@register_runtime``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from bitwright.errors import BitwrightError, MissingExtraError, VerifyError
from bitwright.registry import Registry

Arrays = dict[str, np.ndarray]
Session = Callable[[Mapping[str, np.ndarray]], Arrays]
Role = Literal["compute", "movement", "conversion", "index"]
RUNTIMES: Registry[type["Runtime"]] = Registry("runtime")

# What runtimes call the operators that only move values, and those that only change their type.
_MOVEMENTS = {
    *("Reshape", "Transpose", "Concat", "Concatenation", "QLinearConcat", "Split", "SplitToSequence", "VariadicSplit"),
    *("Slice", "StridedSlice", "Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "ScatterUpdate"),
    *("ScatterNDUpdate", "ScatterElementsUpdate", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand", "Broadcast"),
    *("Tile", "Pad", "DepthToSpace", "SpaceToDepth", "ShuffleChannels", "Reorder", "ReorderInput", "ReorderOutput"),
    *("Shape", "ShapeOf", "Size", "ConstantOfShape", "Constant", "Const", "Parameter", "Result", "Input", "Output"),
    *("MemoryInput", "MemoryOutput", "MemcpyFromHost", "MemcpyToHost", "Reverse", "Trilu"),
}
_CONVERSIONS = {
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "FakeQuantize", "Convert", "Quantize"),
}


def role_of(kind: str, *, index: bool) -> Role:
    """The role of what a runtime calls ``kind``; ``index`` says that it computes neither floats nor bytes."""
    if kind in _MOVEMENTS:
        return "movement"
    if kind in _CONVERSIONS:
        return "conversion"
    return "index" if index else "compute"


@dataclass(frozen=True)
class Executed:
    """One operator that a runtime executed.

    Attributes:
        runs_as: what the runtime calls it.
        role: whether it computes, only moves values, converts them to or from integers, or computes indices and sizes.
        integer: whether it computes on integers of at most 8 bits.
        nodes: the names of the file's operators that it stands for, as far as the runtime tells.
        microseconds: how long it took.
    """

    runs_as: str
    role: Role
    integer: bool
    nodes: tuple[str, ...] = ()
    microseconds: float = 0.0


class Runtime(ABC):
    """A program that executes files.

    Attributes:
        name: how users and backends choose it.
        package: the Python package that it is.
        extra: the extra of Bitwright that installs it.
        formats: the formats that it executes.
        settings: what sessions are told beyond the runtime's defaults, so that they compute in float32.
        reasons: why an operator of the file cannot run in integers here, by its type.
    """

    name = ""
    package = ""
    extra = ""
    formats: ClassVar[tuple[str, ...]] = ("onnx",)
    settings: ClassVar[Mapping[str, str]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        if not self.available():
            raise MissingExtraError(
                f"running a file in {self.name} needs the package '{self.package}', which is not installed: "
                f"pip install 'bitwright[{self.extra}]'"
            )

    @classmethod
    def available(cls) -> bool:
        """Whether the runtime is installed."""
        return find_spec(cls.package) is not None

    @property
    @abstractmethod
    def version(self) -> str:
        """The runtime's version."""

    @abstractmethod
    def session(self, file: Any, threads: int = 0, *, as_is: bool = False) -> Session:  # noqa: ANN401
        """Load a file and return a function from inputs to outputs by name.

        Args:
            file: what a format of this runtime has read.
            threads: how many to use; 0 leaves that to the runtime.
            as_is: leave out ``settings``, as a user does who only opens the file.
        """

    @abstractmethod
    def executed(self, file: Any, feeds: Mapping[str, np.ndarray]) -> list[Executed]:  # noqa: ANN401
        """Run a file once and tell every operator that was executed."""

    def open(self, file: Any, threads: int = 0, *, as_is: bool = False) -> Session:  # noqa: ANN401
        """Load a file as ``session`` does; what fails, or gives anything but arrays by name, raises a VerifyError."""
        with self._failures("refuses the file"):
            session = self.session(file, threads, as_is=as_is)

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            given = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in feeds.items())
            with self._failures(f"cannot run the file on {given}"):
                results = session(feeds)
            if not isinstance(results, Mapping):
                raise VerifyError(f"{self.name} gave {type(results).__name__} for the outputs, not arrays by name")
            for name, value in results.items():
                if not isinstance(value, np.ndarray) or value.dtype.kind in "OSUMm":
                    kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                    raise VerifyError(f"{self.name} gave {kind} for {name}, not an array of numbers")
            return dict(results)

        return run

    def profile(self, file: Any, feeds: Mapping[str, np.ndarray]) -> list[Executed]:  # noqa: ANN401
        """Tell what ``executed`` tells; what fails, or tells anything else, raises a VerifyError."""
        with self._failures("cannot tell what it executed"):
            found = self.executed(file, feeds)
        if not isinstance(found, list) or not all(isinstance(e, Executed) for e in found):
            raise VerifyError(f"{self.name} gave {type(found).__name__} for what it executed, not a list of Executed")
        return found

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except BitwrightError:
            raise
        except Exception as error:
            raise VerifyError(f"{self.name} {what}: {self.words_of(error)}") from error

    def words_of(self, error: Exception) -> str:
        """The line of an error that tells most: the first."""
        return (str(error).strip().splitlines() or [type(error).__name__])[0]

    def default_precision(self) -> str:
        """What this runtime computes float parts in on this machine unless told otherwise; empty for float32."""
        return ""


def register_runtime(name: str, *, override: bool = False) -> Callable[[type[Runtime]], type[Runtime]]:
    """File a runtime under a name."""
    return RUNTIMES.register(name, override=override)
