"""Runtimes that execute an exported file on this machine. A new one is one file with ``@register_runtime``."""

import copy
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from bitwright.errors import BitwrightError, MissingExtraError, VerifyError, useful_line
from bitwright.files import scratch_folder
from bitwright.registry import Registry, check_class
from bitwright.verification.isolation.child import Child, RuntimeDied, child_of

Arrays = dict[str, np.ndarray]
Session = Callable[[Mapping[str, np.ndarray]], Arrays]
Role = Literal["compute", "movement", "conversion", "index"]
_RACES, _WARM_UP = 15, 3  # runs of a race
RUNS = 5
"""Of a file whose operators are timed, after the first."""
RUNTIMES: Registry[type["Runtime"]] = Registry(
    "runtime", lambda cls: check_class(cls, Runtime, {"__init__": ()}, "bitwright/verification/runtimes/base.py")
)

# Runtimes' names for operators that only move values, and for those that only change their type.
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
    """The role of a runtime's operator ``kind``; with ``index``, it computes neither floats nor bytes."""
    if kind in _MOVEMENTS:
        return "movement"
    if kind in _CONVERSIONS:
        return "conversion"
    return "index" if index else "compute"


@dataclass(frozen=True)
class Executed:
    """One operator that a runtime executed.

    Attributes:
        runs_as: the runtime's name for it.
        role: whether it computes, only moves values, converts them to or from integers, or computes indices and sizes.
        integer: whether it computes on integers of at most 8 bits.
        nodes: the names of the file's operators that it covers, as far as the runtime tells.
        microseconds: its time.
    """

    runs_as: str
    role: Role
    integer: bool
    nodes: tuple[str, ...] = ()
    microseconds: float = 0.0


class Runtime(ABC):
    """A program that executes files.

    Attributes:
        name: its name for users and backends.
        package: its Python package.
        extra: the Bitwright extra that installs it.
        formats: the formats that it executes.
        settings: settings of sessions beyond the runtime's defaults, so that they compute in float32.
        float32_settings: those that keep float parts from being computed in less than float32.
        by_default: what it does without ``settings`` that they prevent, in words.
        reasons: why an operator of the file cannot run in integers here, by its type.
        hazards: what environment variables are known to do to it, by their names.
        isolated: whether files run in a child process, so that a crash does not end ours. It applies to the class that
            sets it, which must be at the top level of an importable module, but not to subclasses.
        stands_in: whether it represents a target that is not here: its values count, but not its kernels and speed.
        timeout: seconds that the runtime may take for one step before it counts as hung.
    """

    name = ""
    package = ""
    extra = ""
    formats: ClassVar[tuple[str, ...]] = ("onnx",)
    settings: Mapping[str, str] = {}
    float32_settings: ClassVar[Mapping[str, str]] = {}
    by_default: ClassVar[str] = ""
    reasons: ClassVar[Mapping[str, str]] = {}
    hazards: ClassVar[Mapping[str, str]] = {}
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

        With 0 threads, the runtime chooses their number. ``as_is`` leaves out ``settings``, like a user who just opens
        the file.
        """

    @abstractmethod
    def executed(self, file: Any, feeds: Mapping[str, np.ndarray]) -> list[Executed]:  # noqa: ANN401
        """Run a file once and return every executed operator."""

    def open(self, file: Any, threads: int = 0, *, as_is: bool = False) -> Session:  # noqa: ANN401
        """Like ``session``, but failures, and results other than arrays by name, raise a VerifyError."""
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
        """The results of a session, if they are arrays by name."""
        if not isinstance(results, Mapping):
            raise VerifyError(f"{self.name} returned {type(results).__name__} for the outputs, not arrays by name")
        for name, value in results.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind in "OSUMm":
                kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise VerifyError(f"{self.name} returned {kind} for {name}, not an array of numbers")
        return dict(results)

    def profile(self, file: Any, feeds: Mapping[str, np.ndarray]) -> list[Executed]:  # noqa: ANN401
        """Like ``executed``, but failures and wrong results raise a VerifyError."""
        with self._failures("cannot tell what it executed"):
            found = child_of(self).executed(file, feeds, self.timeout) if self._apart else self.executed(file, feeds)
        if not isinstance(found, list) or not all(isinstance(e, Executed) for e in found):
            raise VerifyError(
                f"{self.name} reported {type(found).__name__} for what it executed, not a list of Executed"
            )
        return found

    def race(self, files: Sequence[Any], feeds: Mapping[str, np.ndarray], *, as_is: bool = False) -> list[float]:
        """Run files in turn on one thread; return the minimum seconds of each."""
        with self._failures("cannot time the file"):
            if self._apart:
                return child_of(self).best_times(files, feeds, self.timeout, as_is=as_is)
            return self.best_times(files, feeds, as_is=as_is)

    def peak_memory(self, file: Any, feeds: Mapping[str, np.ndarray]) -> int | None:  # noqa: ANN401
        """The peak bytes for loading a file and running it once, in a fresh process; None if unknown."""
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
        """Whether files run in a child process: for classes that set this themselves and can be imported there."""
        return os.name == "posix" and vars(type(self)).get("isolated", False)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        hazards = "".join(f"; {name} is set: {does}" for name, does in self.hazards.items() if name in os.environ)
        try:
            yield
        except RuntimeDied as error:
            raise RuntimeDied(f"{self.name} {error}{hazards}") from error
        except BitwrightError:
            raise
        except Exception as error:
            raise VerifyError(f"{self.name} {what}: {self.words_of(error)}{hazards}") from error

    def words_of(self, error: Exception) -> str:
        """The line of an error that says what is wrong."""
        return useful_line(error)

    def in_float32(self) -> "Runtime | None":
        """The same runtime with float parts in float32; None if it has them already, or nothing sets them."""
        if self.float32_settings.items() <= self.settings.items():
            return None
        twin = copy.copy(self)
        twin.settings = {**self.settings, **self.float32_settings}
        return twin

    def affects(self, kinds: Collection[str]) -> bool:
        """Whether ``settings`` may change what operators of these kinds, as the runtime calls them, compute."""
        return bool(self.settings)

    def default_precision(self) -> str:
        """The default precision of float parts in this runtime on this machine; empty for float32."""
        return ""


@contextmanager
def loadable(file: Any) -> Iterator[Any]:  # noqa: ANN401
    """What a runtime loads: the bytes of a file, or the path of the first of several in their own folder."""
    parts = file.shipped()
    if len(parts) == 1:
        yield next(iter(parts.values()))
        return
    with scratch_folder(tempfile.gettempdir()) as folder:
        for name, content in parts.items():
            (folder / name).write_bytes(content)
        yield str(folder / next(iter(parts)))


def register_runtime(name: str, *, override: bool = False) -> Callable[[type[Runtime]], type[Runtime]]:
    """Register a runtime under a name."""
    return RUNTIMES.register(name, override=override)
