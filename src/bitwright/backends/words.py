"""Words that backends share: families of operators and number formats."""

from collections.abc import Iterable

_ALL = (1, 2, 3)
RELUS = frozenset({"relu", "relu6", "clamp"})
LEARNED = "LearnableFakeQuantize"
MOVING_RANGE = "EMAMinMaxObserver"


def convolutions(dims: Iterable[int] = _ALL) -> list[str]:
    """Convolutions and transposed ones over so many dimensions."""
    return [f"{kind}{d}d" for kind in ("conv", "conv_transpose") for d in dims]


def average_pools(dims: Iterable[int] = _ALL) -> list[str]:
    """Average pools; those that take the largest value only move values, and need no scale of their own."""
    return [f"{kind}{d}d" for kind in ("avg_pool", "adaptive_avg_pool") for d in dims]


def up_to(bits: int, *kinds: str) -> frozenset[str]:
    """Number formats of 2 bits to ``bits``: what hardware of so many bits can hold as weights."""
    return frozenset(f"{kind}{b}" for kind in kinds or ("int",) for b in range(2, bits + 1))


# What most deployment toolkits take for integer work on images. A sum or product here includes that with a number.
IMAGE_OPERATORS = (
    *convolutions(),
    "linear",
    "add",
    "mul",
    *average_pools(),
    "interpolate",
    "batch_norm",
    "prelu",
)
