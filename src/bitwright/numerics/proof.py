"""Prove a compiled kernel: compare it with eager on small inputs that reach every branch and the end of a vector.

The inputs are derived from the parameters of the kernel's first call. With u a parameter that has one value per scale
and n an integer among the parameters, ``x`` takes

    u·m    for m = 0, ±¼, ±½, ±1, … far beyond any range, n ± ½ and n ± 1 (ties and ends), and random m

once as they are, and once with infinities, NaN and the largest and smallest numbers mixed in.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwright.numerics.kinds import Kind, PerScale, PerValue

# Even numbers, so that none is equal to a number of levels; not multiples of a vector.
LARGE = (6, 38, 518)
SIZES = (LARGE, (2, 4, 10))
MULTIPLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 3.5, 6.5, 8.0, 15.5, 100.5, 130.0, 1e3, 70000.5, 1e9)
STRANGE = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-42, -0.0)
EVERY = 5  # th value is strange
RANDOM = 199  # multiples
ROUNDING = 1e-5  # of what is not exact
PER_MISS = 256  # values for each one that may differ, where exactness is not required


def difference(
    kernel: Callable[..., Any], eager: Callable[..., Any], args: Sequence[Any], kinds: Sequence[Kind], exact: bool
) -> str | None:
    """Say how a kernel's results differ from the eager ones, or return None.

    The larger inputs come first. ``exact`` asks for the same bits in each value.
    """
    for given, strange in _all_inputs(args, kinds):
        found, wanted = kernel(*given), eager(*given)
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for place, (one, other) in enumerate(pairs):
            single = other.shape == given[0].shape  # one for each value, no sum
            wrong = 0 if strange and not single else _wrong(one, other, exact and single)
            if wrong > (0 if exact or not single else other.numel() // PER_MISS):
                shape = tuple(given[0].shape)
                return f"{wrong} of {other.numel()} values of result {place} differ from eager for a tensor of {shape}"
    return None


def _wrong(found: Tensor, wanted: Tensor, exact: bool) -> int:
    """How many values differ."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return max(1, wanted.numel())
    if exact:
        return int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())
    largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    near = {"rtol": ROUNDING, "atol": largest * ROUNDING / 10, "equal_nan": True}
    return int((~torch.isclose(found.double(), wanted.double(), **near)).sum())


def _all_inputs(args: Sequence[Any], kinds: Sequence[Kind]) -> Iterator[tuple[list[Any], bool]]:
    """Inputs of all sizes, without strange numbers and with them."""
    for sizes in SIZES:
        x, *params = _inputs(args, kinds, sizes)
        yield [x, *params], False
        x = x.clone()
        some = x.view(-1)[::EVERY]
        some.copy_(torch.tensor(STRANGE, device=x.device).repeat(len(some))[: len(some)])
        yield [x, *params], True


def _inputs(args: Sequence[Any], kinds: Sequence[Kind], sizes: tuple[int, ...]) -> list[Any]:
    """Arguments of the same layout as ``args``."""
    x, *params = args
    shape, random = _shape(x.shape, sizes), torch.Generator().manual_seed(0)
    units, ends = [], []
    for place, (param, kind) in enumerate(zip(params, kinds, strict=True)):
        if isinstance(param, Tensor) and kind is PerValue:
            params[place] = (torch.randn(shape, generator=random) * 2).to(param)
        elif isinstance(param, Tensor) and kind is PerScale:
            params[place] = param if param.ndim == 0 else _for_channels(param, shape[1])
            units.append(params[place])
        elif kind is int:
            ends += [param, param - 0.5, param + 0.5, param - 1, param + 1]
    multiples = torch.tensor([*ends, *MULTIPLES, *(-m for m in MULTIPLES)])
    multiples = torch.cat([multiples, torch.randn(RANDOM, generator=random) * 5]).to(x.device)
    return [_values([*units, torch.ones((), device=x.device)], multiples, shape).to(x.dtype), *params]


def _shape(shape: Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """About as many values as ``sizes`` says, (values,) or (outer, channel, inner), ones where ``shape`` has them."""
    many = math.prod(sizes)
    if len(shape) == 1:
        return (many + 2,)
    few = [1 if n == 1 else size for n, size in zip(shape, sizes, strict=True)]
    few[max(d for d, n in enumerate(few) if n > 1)] *= many // math.prod(few)
    return tuple(few)


def _for_channels(param: Tensor, channels: int) -> Tensor:
    """A parameter of shape (channels, 1) with as many channels as asked for: the given ones, repeated."""
    return param.detach()[torch.arange(channels, device=param.device) % len(param)]


def _values(units: Sequence[Tensor], multiples: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiples of all units in turn, at every place of ``shape``."""
    place = torch.arange(math.prod(shape), dtype=torch.int32, device=multiples.device).view(shape)
    multiple = multiples[place // len(units) % len(multiples)]
    for turn, unit in enumerate(units):
        multiple = torch.where(place % len(units) == turn, multiple * unit.detach().float(), multiple)
    return multiple
