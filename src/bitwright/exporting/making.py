"""How a file was made, as its record remembers it: enough to write the file again and compare."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.errors import VerifyError
from bitwright.exporting.formats.base import ExportOptions
from bitwright.exporting.record import ExportRecord
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs

_ALWAYS = ("bitwright", "torch", "onnx_ir")  # onnx_ir comes with onnxscript
_HINTS = ("AUTO", "DYNAMIC", "STATIC")


@dataclass(frozen=True)
class Making:
    """What decides a file's content beside the model.

    Attributes:
        versions: the packages that wrote it.
        options: the values of ``ExportOptions``, as JSON holds them; None if it cannot hold them.
        example: the type and the shape of each input that it was exported with.
    """

    versions: Mapping[str, str]
    options: Mapping[str, Any] | None
    example: Mapping[str, Any]

    @classmethod
    def of(cls, twin: nn.Module, inputs: Inputs, options: ExportOptions, packages: Iterable[str]) -> "Making":
        """Note how a deployed model is being written."""
        given = {field.name: getattr(options, field.name) for field in fields(options)}
        shapes = _encoded(given.pop("dynamic_shapes"))
        given.pop("unsigned_activations")  # the backend decides this
        for key in ("input_names", "output_names"):
            given[key] = None if given[key] is None else list(given[key])
        known = None if shapes is _UNKNOWN else {**given, "dynamic_shapes": shapes}
        return cls(versions_of(packages), known, _shapes(twin, inputs))

    @classmethod
    def noted_in(cls, record: ExportRecord) -> "Making":
        """Read what a record holds."""
        if record.making is None:
            raise VerifyError("it was written by a version of Bitwright that did not note how")
        try:
            return cls(**record.making)
        except TypeError as error:
            raise VerifyError(f"its record does not tell how it was made: {error}") from error

    def options_for(self, *, unsigned: bool) -> ExportOptions:
        """The options that it was written with."""
        if self.options is None:
            raise VerifyError("its record cannot hold the dynamic_shapes that it was exported with")
        given = {**self.options, "dynamic_shapes": _decoded(self.options["dynamic_shapes"])}
        return ExportOptions(**given, unsigned_activations=unsigned)

    def inputs_like(self, model: nn.Module, example: Inputs) -> Inputs:
        """A model's example inputs in the shapes that it was exported with."""
        given = flat_inputs(model, example)
        if given.keys() != self.example.keys():
            raise VerifyError(f"it was exported with the inputs {', '.join(self.example)}, not {', '.join(given)}")
        if _shapes(model, example) == self.example:
            return example
        shapes = {id(tensor): self.example[name] for name, tensor in given.items()}

        def resized(x: object) -> Any:
            return _resized(x, *shapes[id(x)]) if isinstance(x, Tensor) else x

        made: Any = fx.node.map_aggregate((example.args, example.kwargs), resized)
        return Inputs(made[0], dict(made[1]))


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of the packages that write a file."""
    found = {}
    for name in (*_ALWAYS, *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _shapes(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    return {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in flat_inputs(model, inputs).items()}


def _resized(x: Tensor, kind: str, shape: list[int]) -> Tensor:
    """A tensor of another shape with the same values, repeated or cut; zeros if the number of axes differs."""
    if len(shape) != x.ndim:
        return torch.zeros(shape, dtype=getattr(torch, kind))
    for axis, size in enumerate(shape):
        x = x.index_select(axis, torch.arange(size, device=x.device) % max(x.shape[axis], 1))
    return x.to(getattr(torch, kind))


_UNKNOWN = object()


def _encoded(shapes: object) -> Any:
    """Free sizes as JSON holds them, or ``_UNKNOWN``."""
    if shapes is None or isinstance(shapes, bool | int | str):
        return shapes
    if isinstance(shapes, Mapping):
        pairs = [[key, _encoded(value)] for key, value in shapes.items()]
        return _UNKNOWN if any(value is _UNKNOWN for _, value in pairs) else {"by": pairs}
    if isinstance(shapes, tuple | list):
        items = [_encoded(value) for value in shapes]
        return _UNKNOWN if _UNKNOWN in items else items
    return _encoded_dim(shapes)


def _encoded_dim(size: object) -> Any:
    hint = next((name for name in _HINTS if size == getattr(torch.export.Dim, name)), None)
    if hint is not None:
        return {"hint": hint}
    if type(size) is torch.export.Dim:
        limits = [limit if type(limit) is int else None for limit in (size.min, size.max)]  # None is infinite
        return {"dim": [size.__name__, *limits]}
    return _UNKNOWN


def _decoded(shapes: object) -> Any:
    if isinstance(shapes, list):
        return [_decoded(value) for value in shapes]
    if not isinstance(shapes, dict):
        return shapes
    if "by" in shapes:
        return {key: _decoded(value) for key, value in shapes["by"]}
    if "hint" in shapes:
        return getattr(torch.export.Dim, shapes["hint"])
    name, least, most = shapes["dim"]
    return torch.export.Dim(name, min=least, max=most)
