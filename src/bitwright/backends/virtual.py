"""A machine that has every number format: for simulation, with whatever specs you ask for."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import RELUS, average_pools, convolutions
from bitwright.spec import QuantSpec

VIRTUAL = register_backend()(
    Backend(
        name="virtual",
        title="simulation without limits: any format, any granularity",
        weight=QuantSpec.parse("int8 symmetric channel:0"),
        activation=QuantSpec.parse("uint8 affine tensor"),
        integer=dict.fromkeys(
            (
                *convolutions(),
                "linear",
                "matmul",
                "add",
                "sub",
                "mul",
                "mean",
                *average_pools(),
                "interpolate",
                "prelu",
            ),
            "inputs",
        ),
        fused=RELUS,
        reasons={"div": "a divisor that rounds to zero would give infinity"},
        integer_bias=False,
        weight_grains=frozenset({"tensor", "channel", "group"}),
        activation_grains=frozenset({"tensor", "channel", "group"}),
        weight_schemes=frozenset({"symmetric", "affine"}),
        notes=("It simulates: no hardware is meant, and what is exported may run nowhere in integers.",),
    )
)
