"""Qualcomm SNPE: affine uint8 for everything, one scale per tensor; results are quantized too."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import IMAGE_OPERATORS, LEARNED, MOVING_RANGE, RELUS, up_to
from bitwright.spec import QuantSpec

SNPE = register_backend()(
    Backend(
        name="snpe",
        title="Qualcomm SNPE (DSP)",
        weight=QuantSpec.parse("uint8 affine tensor"),
        activation=QuantSpec.parse("uint8 affine tensor"),
        integer=dict.fromkeys(IMAGE_OPERATORS, "both"),
        fused=RELUS,
        merged={"add": frozenset({"mul"})},
        numbers=frozenset({"add", "mul"}),
        reasons={"cat": "it only gathers: what reads the result quantizes it"},
        weight_formats=up_to(8, "uint"),
        activation_formats=frozenset({"uint8"}),
        weight_grains=frozenset({"tensor"}),
        weight_schemes=frozenset({"affine"}),
        activation_schemes=frozenset({"affine"}),
        observer=MOVING_RANGE,
        method=LEARNED,
    )
)
