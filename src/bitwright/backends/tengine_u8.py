"""Tengine in uint8: affine, one scale per tensor, every result quantized, the network's output too."""

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.backends.words import IMAGE_OPERATORS

TENGINE_U8 = register_backend(
    SNPE.with_(
        name="tengine_u8",
        title="Tengine, uint8",
        formats=("tengine", "onnx"),
        constraints=("tengine-*",),
        weights={"formats": ("uint8",)},
        operators={
            "integer": dict.fromkeys((*IMAGE_OPERATORS, "cat", "hardswish", "sigmoid"), "both"),
            "unfused": ("add", "mul", "cat"),
            "merged": {},
            "reasons": {},
        },
    )
)
