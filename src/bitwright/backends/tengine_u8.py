"""Tengine in uint8: affine, one scale per tensor, every result quantized, the network's output too."""

from dataclasses import replace

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.backends.words import IMAGE_OPERATORS

TENGINE_U8 = register_backend()(
    replace(
        SNPE,
        name="tengine_u8",
        title="Tengine, uint8",
        integer=dict.fromkeys((*IMAGE_OPERATORS, "cat", "hardswish", "sigmoid"), "both"),
        unfused=frozenset({"add", "mul", "cat"}),
        merged={},
        reasons={},
    )
)
