"""SenseTime's STPU: symmetric int8 without its lowest value, one scale per tensor, scales fixed by calibration."""

from dataclasses import replace

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.backends.words import up_to
from bitwright.spec import QuantSpec

STPU = register_backend()(
    replace(
        SNPE,
        name="stpu",
        title="SenseTime STPU",
        weight=QuantSpec.parse("int8 symmetric narrow tensor"),
        activation=QuantSpec.parse("int8 symmetric narrow tensor"),
        weight_formats=up_to(8),
        activation_formats=frozenset({"int8"}),
        weight_schemes=frozenset({"symmetric"}),
        activation_schemes=frozenset({"symmetric"}),
        method="FixedFakeQuantize",
    )
)
