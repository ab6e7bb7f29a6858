"""Free sizes of inputs: those that the model accepts in other values, or those that the user names."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError, suggest
from bitwright.graph import Inputs
from bitwright.graph.inputs import bind_inputs, by_parameter, flat_inputs

_log = logging.getLogger("bitwright.exporting")
BATCH = "batch"
Size = int | str
Names = dict[tuple[str, int], str]  # the user's name for the size of an argument along an axis


FixedSizes = Callable[[], AbstractContextManager[list[Any]]]


def _nothing() -> AbstractContextManager[list[Any]]:
    return nullcontext([])


class Sizes:
    """The sizes of a model's inputs, with at least two samples: the exporter treats a size of one as constant.

    Equal sizes count as one, in whatever inputs; the batch size is separate.

    ``fixed`` lists, as the model runs, what a file must know as numbers, with the reasons.
    """

    def __init__(self, twin: nn.Module, inputs: Inputs, fixed: FixedSizes = _nothing) -> None:
        def double(x: Tensor) -> Tensor:
            return torch.cat([x, x]) if x.ndim and x.shape[0] == 1 else x

        self.twin, self.fixed = twin, fixed
        self.needed: list[Any] | None = None
        self.inputs = Inputs(_map(inputs.args, double), _map(inputs.kwargs, double))
        self.tensors = list(flat_inputs(twin, self.inputs).values())
        self.batch = next((t.shape[0] for t in self.tensors if t.ndim), 0)

    def free(self) -> list[Size]:
        """The sizes that the model accepts doubled or halved; the batch size first."""
        sizes = {self._size(axis, n) for t in self.tensors for axis, n in enumerate(t.shape) if n > 1}
        return [s for s in sorted(sizes, key=str, reverse=True) if self._takes(s, 2) or self._takes(s, 0.5)]

    def shapes(self, free: list[Size]) -> Any:
        """Shapes as the exporter expects them; it fixes those that it cannot leave free."""

        def shape(x: Tensor) -> dict[int, Any]:
            return {axis: torch.export.Dim.AUTO for axis, n in enumerate(x.shape) if self._size(axis, n) in free}

        bound = bind_inputs(self.twin, self.inputs.args, self.inputs.kwargs)
        return by_parameter(self.twin, self.inputs, _map(bound, shape, lambda _: None))

    def _size(self, axis: int, size: int) -> Size:
        return BATCH if axis == 0 and size == self.batch else size

    def _takes(self, size: Size, factor: float) -> bool:
        """Whether the model accepts another value for a size; a size of one proves nothing, because it broadcasts."""
        if int((self.batch if size == BATCH else int(size)) * factor) < 2:
            return False

        def resize(x: Tensor) -> Tensor:
            for axis in [a for a, n in enumerate(x.shape) if self._size(a, n) == size]:
                x = torch.cat([x, x], axis).narrow(axis, 0, int(x.shape[axis] * factor))
            return x

        try:
            if self.needed is None:
                self.needed = self._run(lambda x: x)
            needed = self._run(resize)
        except Exception:  # whatever the model or its guards say, it accepts no other
            return False
        changed = next((now for now, then in zip(needed, self.needed, strict=False) if now != then), None)
        if changed is not None:
            _log.info("sizes of %s are not free: %s", size, changed[0])
        return changed is None

    def _run(self, resize: Callable[[Tensor], Tensor]) -> list[Any]:
        """Run the model; return what a file must know as numbers."""
        with torch.no_grad(), self.fixed() as needed:
            self.twin(*_map(self.inputs.args, resize), **_map(self.inputs.kwargs, resize))
        return needed


class WishedSizes:
    """Sizes that the user wants free, as in ``torch.export``; a name may stand for a ``Dim``.

    Attributes:
        shapes: as the exporter expects them.
        names: the user's names for the sizes.
    """

    def __init__(self, twin: nn.Module, inputs: Inputs, wished: object) -> None:
        self.names: Names = {}
        bound = bind_inputs(twin, inputs.args, inputs.kwargs)
        given = _by_argument(wished, list(bound))
        self._shapes = {name: self._shape(value, given.get(name), name) for name, value in bound.items()}
        self.shapes = by_parameter(twin, inputs, self._shapes)
        self._bound, self._positional = bound, len(inputs.args)

    @cached_property
    def inputs(self) -> Inputs:
        """What to export with: the inputs, doubled along free sizes of one, which the exporter would fix."""
        doubled = [(name, _doubled(value, self._shapes[name])) for name, value in self._bound.items()]
        return Inputs(tuple(value for _, value in doubled[: self._positional]), dict(doubled[self._positional :]))

    def _shape(self, value: Any, shape: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            return {axis: self._size(size, place, axis) for axis, size in _axes(value, shape, place)}
        if isinstance(value, Mapping):
            parts = shape or {}
            return {key: self._shape(item, parts.get(key), f"{place}_{key}") for key, item in value.items()}
        if isinstance(value, tuple | list):
            parts = shape or [None] * len(value)
            if len(parts) != len(value):
                raise ConfigError(f"dynamic_shapes has {len(parts)} shapes for {place!r}, which has {len(value)} parts")
            items = enumerate(zip(value, parts, strict=True))
            return type(value)(self._shape(item, part, f"{place}_{i}") for i, (item, part) in items)
        return None

    def _size(self, size: object, place: str, axis: int) -> Any:
        name = size if isinstance(size, str) else getattr(size, "__name__", "")
        if isinstance(size, str) and not size.isidentifier():
            raise ConfigError(f"dynamic_shapes calls axis {axis} of {place!r} {size!r}, which is not an identifier")
        if isinstance(name, str) and name.isidentifier():
            self.names[place, axis] = name
        return torch.export.Dim.DYNAMIC if isinstance(size, str) else size


def _by_argument(wished: object, arguments: list[str]) -> dict[str, Any]:
    """The shapes of arguments by their names; those that are not mentioned are fixed."""
    if isinstance(wished, Mapping):
        unknown = [name for name in wished if name not in arguments]
        if unknown:
            raise ConfigError(
                f"dynamic_shapes names {unknown[0]!r}, and the model takes {', '.join(arguments)}"
                f"{suggest(str(unknown[0]), arguments)}"
            )
        return dict(wished)
    if not isinstance(wished, tuple | list) or len(wished) > len(arguments):
        count = f"{len(wished)} shapes" if isinstance(wished, tuple | list) else repr(wished)
        raise ConfigError(
            f"dynamic_shapes must be True, False, or shapes of the arguments {', '.join(arguments)} by name or in "
            f"order, not {count}"
        )
    return dict(zip(arguments, wished, strict=False))


def _axes(value: Tensor, shape: object, place: str) -> Iterator[tuple[int, Any]]:
    """The axes of a tensor with a size that the user set."""
    if not isinstance(shape, Mapping | tuple | list | None):
        raise ConfigError(f"dynamic_shapes has {shape!r} for {place!r}: give {{axis: size}} or a list of sizes")
    listed = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
    for axis, size in listed:
        if not isinstance(axis, int) or not -value.ndim <= axis < value.ndim:
            raise ConfigError(f"dynamic_shapes names axis {axis!r} of {place!r}, which has {value.ndim} dimensions")
        if size is not None:
            yield axis % value.ndim, size


def _doubled(value: Any, shape: Any) -> Any:
    """A value with its free sizes of one doubled."""
    if isinstance(value, Tensor):
        for axis, size in (shape or {}).items():
            fixed = isinstance(size, int) or size == torch.export.Dim.STATIC
            value = torch.cat([value, value], axis) if value.shape[axis] == 1 and not fixed else value
        return value
    if isinstance(value, Mapping):
        return {key: _doubled(item, shape[key]) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_doubled(item, part) for item, part in zip(value, shape, strict=True))
    return value


def _map(value: object, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda v: v) -> Any:
    """Apply a function to all tensors of inputs, and another to everything else."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(item, function, other) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function, other) for item in value)
    return other(value)


def name_sizes(model: Any, arguments: list[str], wished: Names) -> set[str]:
    """Name the free sizes as the user does, or after the first inputs that have them; return the names."""
    names: dict[str, str] = {}
    given = zip(arguments, model.graph.inputs, strict=False)
    free = [(argument, *found) for argument, value in given for found in _free_sizes(value) if found[1].isidentifier()]
    for argument, axis, symbol in free:
        if (argument, axis) in wished:
            names.setdefault(symbol, wished[argument, axis])
    for argument, axis, symbol in free:
        first = BATCH not in names.values() and axis == 0
        names.setdefault(symbol, BATCH if first else f"{argument}_{axis}")
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]
    for value in values:
        for axis, size in _free_sizes(value):
            value.shape[axis] = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), size)
    return set(names.values())


def _free_sizes(value: Any) -> list[tuple[int, str]]:
    """The axes of a tensor whose sizes are free, with the symbol or expression of each."""
    import onnx_ir as ir

    return [(i, s.value) for i, s in enumerate(value.shape or ()) if isinstance(s, ir.SymbolicDim) and s.value]
