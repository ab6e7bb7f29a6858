"""Shared terms of backends: families of operators, and number formats."""

RELUS = ("relu", "relu6", "clamp")
CONVOLUTIONS = ("conv?d", "conv_transpose?d")
AVERAGE_POOLS = ("avg_pool?d", "adaptive_avg_pool?d")  # those that take the largest value only move values
# What most deployment toolkits run in integers on images. A sum or product includes one with a number.
IMAGE_OPERATORS = (*CONVOLUTIONS, "linear", "add", "mul", *AVERAGE_POOLS, "interpolate", "batch_norm", "prelu")
LEARNED = "LearnableFakeQuantize"
MOVING_RANGE = "EMAMinMaxObserver"


def up_to(bits: int, kind: str = "int", least: int = 2) -> tuple[str, ...]:
    """Number formats of ``least`` bits to ``bits``: what hardware of so many bits can hold as weights."""
    return tuple(f"{kind}{b}" for b in range(least, bits + 1))
