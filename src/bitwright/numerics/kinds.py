"""How a kernel's parameters relate to its values, as annotations."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

from torch import Tensor

PerValue = Annotated[Tensor, "one for each value of x"]
PerScale = Annotated[Tensor, "one for each scale"]
Kind = Any  # PerValue, PerScale, or the type of an argument that reaches the kernel unchanged


def kinds_of(kernel: Callable[..., Any]) -> dict[str, Kind]:
    """The parameters of a kernel after ``x``, each with its kind; that of ``PerScale | None`` is PerScale."""
    found = {}
    for name, parameter in list(inspect.signature(kernel).parameters.items())[1:]:
        kind = parameter.annotation
        found[name] = next((part for part in get_args(kind) if part in (PerValue, PerScale)), kind)
    return found
