"""The user's data: batches that can be iterated repeatedly, and example inputs for the model."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bitwright.cli.boundary import users_code
from bitwright.errors import CalibrationError, ConfigError

if TYPE_CHECKING:
    from torch import nn


class Batches:
    """Batches that can be iterated several times, and that name their source if it raises."""

    def __init__(self, name: str, begin: Callable[[], Iterable[Any]]) -> None:
        self.name, self._begin = name, begin

    def __iter__(self) -> Iterator[Any]:
        with users_code(self.name):
            iterator = iter(self._begin())
        while True:
            with users_code(self.name):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def first(self) -> Any:  # noqa: ANN401
        """The first batch."""
        for batch in self:
            return batch
        raise CalibrationError(f"{self.name} is empty: it yielded no batch")


class SizedBatches(Batches):
    """Batches of known length, so that a progress bar can show the end."""

    def __len__(self) -> int:
        return len(self._begin())  # pyrefly: ignore


def read_batches(given: object, name: str) -> Batches:
    """Take an iterable, or a function that returns one; a function that yields is called for each pass."""
    found = call_if_function(given, name)
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        raise ConfigError(f"{name} must return an iterable of batches, not {type(found).__name__}")
    if isinstance(found, Iterator) and callable(given):
        unused = [found]
        return Batches(name, lambda: unused.pop() if unused else given())
    if isinstance(found, Iterator):
        with users_code(name):
            found = list(found)
    try:
        len(found)  # pyrefly: ignore
    except TypeError:  # a DataLoader without a known length raises this
        return Batches(name, lambda: found)
    return SizedBatches(name, lambda: found)


def call_if_function(given: object, name: str) -> Any:  # noqa: ANN401
    """Call what the user named, if it can be called."""
    if not callable(given):
        return given
    with users_code(name):
        return given()


def cut_to_model(model: "nn.Module", batch: object) -> Any:  # noqa: ANN401
    """Drop from a batch what follows the inputs that the model needs, such as labels."""
    if not isinstance(batch, tuple | list):
        return batch
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(batch)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    return tuple(batch)[: needed or 1]


def example_of_shapes(shapes: Iterable[str]) -> tuple[Any, ...]:
    """Random float inputs of the shapes given by strings such as ``1,3,224,224``."""
    import torch

    sizes: list[list[int]] = []
    for text in shapes:
        parts = text.replace("x", ",").split(",")
        if not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
            raise ConfigError(f"--shape {text!r} must be positive sizes with commas between, such as 1,3,224,224")
        sizes.append([int(p) for p in parts])
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator) for size in sizes)
