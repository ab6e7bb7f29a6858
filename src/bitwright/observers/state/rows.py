"""Rows: every tensor as (outer, channel, inner), in blocks that stay in cache, for observers of all granularities."""

from collections.abc import Iterator

from torch import Tensor

from bitwright.numerics.views import canonical
from bitwright.spec import PerGroup, PerTensor, QuantSpec

BLOCK = 1 << 18


def as_rows(x: Tensor, spec: QuantSpec) -> Tensor:
    """View ``x`` as (outer, channel, inner), one channel for each scale of the spec.

    A whole tensor is one channel: (1, 1, n). A weight (64, 3, 7, 7) by channel 0 is (1, 64, 147), an activation
    (8, 64, 14, 14) by channel 1 is (8, 64, 196). The channels are in the order that :func:`as_params` undoes.
    """
    if isinstance(spec.granularity, PerTensor):
        return canonical(x, None, None).values.reshape(1, 1, -1)
    group = spec.granularity.size if isinstance(spec.granularity, PerGroup) else None
    return canonical(x, spec.granularity.axis, group).values


def as_params(flat: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """Give one value per channel, in the order of :func:`as_rows`, the shape of the spec's scale, in float32."""
    flat = flat.float()
    if not isinstance(spec.granularity, PerGroup):
        return flat.reshape(shape)
    # Groups come in the order (other axes, groups): bring the group axis back to its place.
    axis = spec.granularity.axis % len(shape)
    others = [n for d, n in enumerate(shape) if d != axis]
    return flat.reshape(*others, -1).movedim(-1, axis)


def blocks(rows: Tensor, size: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """Cut (outer, channel, inner) into blocks of about ``size`` values: which channels, and (outer', c', inner')."""
    outer, channels, inner = rows.shape
    if channels * inner <= size:
        step = max(1, size // (channels * inner))
        for start in range(0, outer, step):
            yield slice(0, channels), rows[start : start + step]
        return
    wide, long = max(1, size // inner), min(inner, size)
    for at in range(outer):
        for first in range(0, channels, wide):
            part = rows[at : at + 1, first : first + wide]
            for start in range(0, inner, long):
                yield slice(first, min(first + wide, channels)), part[:, :, start : start + long]


def row_min_max(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each channel of (outer, channel, inner), in float32."""
    if rows.shape[1] == 1:
        lo, hi = (v.reshape(1) for v in rows.aminmax())
    else:  # two passes: aminmax(dim=…) takes five times as long
        lo, hi = rows.amin((0, 2)), rows.amax((0, 2))
    return lo.float(), hi.float()
