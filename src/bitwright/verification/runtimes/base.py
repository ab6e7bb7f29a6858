"""Runtimes that execute an exported file on this machine. A new one is one file with ``@register_runtime``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from bitwright.errors import MissingExtraError
from bitwright.registry import Registry

if TYPE_CHECKING:
    import onnx

    from bitwright.verification.onnx_file import FileOperator

Arrays = dict[str, np.ndarray]
Session = Callable[[Mapping[str, np.ndarray]], Arrays]
RUNTIMES: Registry[type["Runtime"]] = Registry("runtime")


class Runtime(ABC):
    """A program that executes ONNX files."""

    name = ""
    package = ""
    extra = ""
    reasons: ClassVar[Mapping[str, str]] = {}  # why an ONNX operator cannot run in integers here

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
    def session(self, model: "onnx.ModelProto", threads: int = 0) -> Session:
        """Load a model and return a function from inputs to outputs by name; ``threads=0`` leaves their number open."""

    @abstractmethod
    def executed_as(self, model: "onnx.ModelProto", operators: list["FileOperator"]) -> dict[str, tuple[bool, str]]:
        """For each operator, whether the runtime executes it in integers, and what it has turned it into."""


def register_runtime(name: str, *, override: bool = False) -> Callable[[type[Runtime]], type[Runtime]]:
    """File a runtime under a name."""
    return RUNTIMES.register(name, override=override)
