"""Find the sizes that a file must know as numbers while the model runs, because a failing export takes long.

Translations refuse these sizes if they are free: ``operators.py``, ``adaptive.py`` and ``nearest.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bitwright.exporting.onnx.nearest import NEEDS_A_SIZE, is_exact
from bitwright.torch_internals import watching_operators

Found = tuple[str, tuple[int, ...]]


@contextmanager
def fixed_sizes() -> Iterator[list[Found]]:
    """While a model runs, list the operators that need fixed sizes, with these sizes."""
    found: list[Found] = []

    def look(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        needed = _NEEDED.get(operator)
        if needed is not None:
            words, sizes = needed(*args, **kwargs)
            found.extend([(words, tuple(sizes))] if sizes else [])

    with watching_operators(look):
        yield found


def _with_ceil_mode(x: Tensor, kernel: Any, stride: Any = (), *rest: Any, at: int) -> tuple[str, Sequence[int]]:
    ceil_mode = rest[at] if len(rest) > at else False
    sizes = x.shape[-len(kernel) :] if ceil_mode and set(stride or kernel) != {1} else ()
    return "a pool with ceil_mode needs a fixed size: its last window depends on it", sizes


def _largest(x: Tensor, kernel: Any, *rest: Any) -> tuple[str, Sequence[int]]:
    return _with_ceil_mode(x, kernel, *rest, at=2)


def _average(x: Tensor, kernel: Any, *rest: Any) -> tuple[str, Sequence[int]]:
    return _with_ceil_mode(x, kernel, *rest, at=1)


def _adaptive(x: Tensor, windows: Sequence[int]) -> tuple[str, Sequence[int]]:
    sizes = zip(x.shape[-len(windows) :], windows, strict=True)
    return "an adaptive pool needs a fixed size: its windows depend on it", [n for n, count in sizes if count != 1]


def _nearest(x: Tensor, _: Sequence[int], *factors: float | None) -> tuple[str, Sequence[int]]:
    inexact = any(factor is not None and not is_exact(factor) for factor in factors)
    return NEEDS_A_SIZE, x.shape[2:] if inexact else ()


def _split(x: Tensor, _: int, dim: int = 0) -> tuple[str, Sequence[int]]:
    return "a split into equal pieces needs a fixed size, which decides how many there are", (x.shape[dim],)


_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
_aten = torch.ops.aten
_NEEDED: dict[object, Callable[..., tuple[str, Sequence[int]]]] = {
    **dict.fromkeys((_aten.max_pool2d_with_indices.default, _aten.max_pool3d_with_indices.default), _largest),
    **dict.fromkeys((_aten.avg_pool2d.default, _aten.avg_pool3d.default), _average),
    **dict.fromkeys((_aten._adaptive_avg_pool2d.default, _aten._adaptive_avg_pool3d.default), _adaptive),
    **dict.fromkeys((_aten.adaptive_max_pool2d.default, _aten.adaptive_max_pool3d.default), _adaptive),
    **{getattr(_aten, f"{name}{rank}d").default: _nearest for name in _NEAREST for rank in (1, 2, 3)},
    _aten.split.Tensor: _split,
}
