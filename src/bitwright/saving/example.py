"""Example inputs without their data: shapes, types and limits, and safe inputs generated from them.

Values matter if they are indices, lengths or offsets. A generated tensor spans the limits of the original in equal
steps, sorted if that was sorted, so it stays within every table that the original was looked up in.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr
from torch import Tensor

from bitwright.errors import SaveError
from bitwright.validation import Strict

Order = Literal["rising", "falling", "any"]
_STRIDE = 7919  # a prime: stepping by it visits every place in a fixed, scattered order


class TensorLike(Strict):
    """A tensor without its data."""

    kind: Literal["tensor"] = "tensor"
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    low: float = 0.0
    high: float = 0.0
    order: Order = "any"


class Group(Strict):
    """A tuple, list or dict of inputs."""

    kind: Literal["tuple", "list", "dict"]
    items: tuple["Described", ...]
    keys: tuple[str, ...] = ()


class Plain(Strict):
    """A number, a flag, a text or None."""

    kind: Literal["value"] = "value"
    value: StrictBool | StrictInt | StrictFloat | StrictStr | None


class Unknown(Strict):
    """Something that a file of plain data cannot hold."""

    kind: Literal["unknown"] = "unknown"
    type: str


Described = Annotated[TensorLike | Group | Plain | Unknown, Field(discriminator="kind")]
Group.model_rebuild()


def describe(value: Any) -> TensorLike | Group | Plain | Unknown:  # noqa: ANN401
    """Describe an input."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
        return _describe_tensor(value)
    if value is None or (isinstance(value, bool | int | float | str) and _is_plain(value)):
        return Plain(value=value)
    if type(value) in (tuple, list):
        return Group(kind="tuple" if type(value) is tuple else "list", items=tuple(map(describe, value)))
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return Group(kind="dict", items=tuple(map(describe, value.values())), keys=tuple(value))
    return Unknown(type=type(value).__qualname__)


def _is_plain(value: float | str) -> bool:
    return type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _describe_tensor(value: Tensor) -> TensorLike:
    numbers = value.detach().flatten()
    numbers = numbers.real if numbers.is_complex() else numbers
    numbers = numbers.double() if numbers.is_floating_point() else numbers.long()
    numbers = numbers[torch.isfinite(numbers)]
    made = {"dtype": str(value.dtype).removeprefix("torch."), "shape": tuple(value.shape)}
    if not numbers.numel():
        return TensorLike(**made)
    steps = numbers.diff()
    order: Order = "rising" if bool((steps >= 0).all()) else "falling" if bool((steps <= 0).all()) else "any"
    return TensorLike(**made, low=float(numbers.min()), high=float(numbers.max()), order=order)


def make(described: TensorLike | Group | Plain | Unknown, tensor: Callable[[TensorLike], Tensor] | None = None) -> Any:  # noqa: ANN401
    """Generate an input from its description; ``tensor`` generates its tensors."""
    if isinstance(described, TensorLike):
        return (tensor or made_tensor)(described)
    if isinstance(described, Plain):
        return described.value
    if isinstance(described, Unknown):
        raise SaveError(
            f"the example inputs have a {described.type}, which a folder cannot hold: give load(…, example_inputs=…)"
        )
    items = [make(item, tensor) for item in described.items]
    if described.kind == "dict":
        return dict(zip(described.keys, items, strict=True))
    return tuple(items) if described.kind == "tuple" else items


def made_tensor(described: TensorLike) -> Tensor:
    """A tensor that spans the limits of the one described."""
    count = math.prod(described.shape)
    places = torch.arange(count, dtype=torch.float64)
    if described.order == "falling":
        places = places.flip(0)
    elif described.order == "any" and count:
        places = (places * _STRIDE) % count
    values = described.low + places / max(count - 1, 1) * (described.high - described.low)
    dtype = dtype_of(described)
    if not (dtype.is_floating_point or dtype.is_complex):
        values = values.round().clamp(described.low, described.high)
    return values.to(dtype).reshape(described.shape)


def dtype_of(described: TensorLike) -> torch.dtype:
    """The type of a tensor by its name."""
    found = getattr(torch, described.dtype, None)
    if not isinstance(found, torch.dtype):
        raise SaveError(f"this torch has no tensors of type {described.dtype!r}, which the example inputs had")
    return found


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in example inputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
