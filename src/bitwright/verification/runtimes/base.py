"""Runtimes that execute an exported file on this machine. A new one is one file with ``@register_runtime``."""

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from bitwright.errors import BitwrightError, MissingExtraError, VerifyError
from bitwright.files import scratch_folder
from bitwright.registry import Registry
from bitwright.verification.isolation.child import Child, RuntimeDied, child_of

Arrays = dict[str, np.ndarray]
Session = Callable[[Mapping[str, np.ndarray]], Arrays]
Role = Literal["compute", "movement", "conversion", "index"]
_RACES, _WARM_UP = 15, 3  # runs of a race
RUNS = 5
"""Of a file whose operators are timed, after the first."""
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
        isolated: whether files run in a process of their own, so that a crash is not ours. It holds for the class that
            sets it, which must be at the top of an importable module; not for classes derived from it.
        stands_in: whether it is in the place of a target that is not here: its values count, not its kernels and speed.
        timeout: seconds that the runtime may take for one step before it counts as hung.
    """

    name = ""
    package = ""
    extra = ""
    formats: ClassVar[tuple[str, ...]] = ("onnx",)
    settings: ClassVar[Mapping[str, str]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    isolated: ClassVar[bool] = False
    stands_in: ClassVar[bool] = False
    timeout: float = 600.0

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
        if file.format not in self.formats:
            raise VerifyError(f"{self.name} executes {', '.join(self.formats)}, not {file.format}")
        with self._failures("refuses the file"):
            if self._apart:
                session: Session = child_of(self).session(file, self.timeout, threads=threads, as_is=as_is)
            else:
                session = self.session(file, threads, as_is=as_is)

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            given = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in feeds.items())
            with self._failures(f"cannot run the file on {given}"):
                return self.checked(session(feeds))

        return run

    def checked(self, results: Any) -> Arrays:  # noqa: ANN401
        """What a session gave, if it is arrays by name."""
        if not isinstance(results, Mapping):
            raise VerifyError(f"{self.name} returned {type(results).__name__} for the outputs, not arrays by name")
        for name, value in results.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind in "OSUMm":
                kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise VerifyError(f"{self.name} returned {kind} for {name}, not an array of numbers")
        return dict(results)

    def profile(self, file: Any, feeds: Mapping[str, np.ndarray]) -> list[Executed]:  # noqa: ANN401
        """Tell what ``executed`` tells; what fails, or tells anything else, raises a VerifyError."""
        with self._failures("cannot tell what it executed"):
            found = child_of(self).executed(file, feeds, self.timeout) if self._apart else self.executed(file, feeds)
        if not isinstance(found, list) or not all(isinstance(e, Executed) for e in found):
            raise VerifyError(
                f"{self.name} reported {type(found).__name__} for what it executed, not a list of Executed"
            )
        return found

    def race(self, files: Sequence[Any], feeds: Mapping[str, np.ndarray], *, as_is: bool = False) -> list[float]:
        """Run files in turn on one thread; return the least seconds that each took."""
        with self._failures("cannot time the file"):
            if self._apart:
                return child_of(self).best_times(files, feeds, self.timeout, as_is=as_is)
            return self.best_times(files, feeds, as_is=as_is)

    def peak_memory(self, file: Any, feeds: Mapping[str, np.ndarray]) -> int | None:  # noqa: ANN401
        """The bytes that loading a file and running it once take at most, in a fresh process; None if not known."""
        if not self._apart:
            return None
        child = Child(type(self).__module__, type(self).__qualname__)
        try:
            with self._failures("cannot be measured"):
                return child.peak_memory(file, feeds, self.timeout)
        finally:
            child.end()

    def best_times(self, files: Sequence[Any], feeds: Mapping[str, np.ndarray], *, as_is: bool) -> list[float]:
        """The work of ``race``, in the process that executes."""
        sessions = [self.session(file, threads=1, as_is=as_is) for file in files]
        best = [float("inf")] * len(sessions)
        for run in range(_WARM_UP + _RACES):
            for i, session in enumerate(sessions):
                start = time.perf_counter()
                session(feeds)
                if run >= _WARM_UP:
                    best[i] = min(best[i], time.perf_counter() - start)
        return best

    @property
    def _apart(self) -> bool:
        """Whether files run in a process of their own: for classes that say so themselves and can be imported there."""
        return os.name == "posix" and vars(type(self)).get("isolated", False)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeDied as error:
            raise RuntimeDied(f"{self.name} {error}") from error
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


@contextmanager
def loadable(file: Any) -> Iterator[Any]:  # noqa: ANN401
    """What a runtime loads: the bytes of a file, or the path of the first of several in a folder of their own."""
    parts = file.shipped()
    if len(parts) == 1:
        yield next(iter(parts.values()))
        return
    with scratch_folder(tempfile.gettempdir()) as folder:
        for name, content in parts.items():
            (folder / name).write_bytes(content)
        yield str(folder / next(iter(parts)))


def register_runtime(name: str, *, override: bool = False) -> Callable[[type[Runtime]], type[Runtime]]:
    """File a runtime under a name."""
    return RUNTIMES.register(name, override=override)
