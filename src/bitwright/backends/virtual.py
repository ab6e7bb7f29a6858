"""A virtual machine with every number format, for simulation with whatever specs you choose."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import AVERAGE_POOLS, CONVOLUTIONS, RELUS

_ANYTHING = {"granularities": ("tensor", "channel", "group"), "schemes": ("symmetric", "affine")}
_OPERATORS = (
    *(*CONVOLUTIONS, "linear", "matmul", "add", "sub", "mul", "mean"),
    *(*AVERAGE_POOLS, "interpolate", "prelu"),
)

VIRTUAL = register_backend(
    Backend.of(
        name="virtual",
        title="simulation without limits: any format, any granularity",
        weights={"spec": "int8 symmetric channel:0", **_ANYTHING},
        activations={"spec": "uint8 affine tensor", **_ANYTHING},
        integer_bias=False,
        operators={
            "integer": dict.fromkeys(_OPERATORS, "inputs"),
            "fused": RELUS,
            "reasons": {"div": "a divisor that rounds to zero would give infinity"},
        },
        notes=("It simulates: no hardware is meant, and what is exported may run nowhere in integers.",),
    )
)
