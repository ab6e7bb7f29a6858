"""Qualcomm SNPE: affine uint8 for everything, one scale per tensor; results are quantized too."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import IMAGE_OPERATORS, LEARNED, MOVING_RANGE, RELUS, up_to

_TENSORS = {"spec": "uint8 affine tensor", "schemes": ("affine",), "method": LEARNED}

SNPE = register_backend(
    Backend.of(
        name="snpe",
        title="Qualcomm SNPE (DSP)",
        weights={**_TENSORS, "formats": up_to(8, "uint", least=4), "granularities": ("tensor",)},
        activations={**_TENSORS, "formats": ("uint8",), "observer": MOVING_RANGE},
        operators={
            "integer": dict.fromkeys(IMAGE_OPERATORS, "both"),
            "fused": RELUS,
            "merged": {"add": ("mul",)},
            "numbers": ("add", "mul"),
            "reasons": {"cat": "it only gathers: what reads the result quantizes it"},
        },
        formats=("qualcomm-0.6.1", "qualcomm-1.0.0", "qualcomm-2.0.0", "onnx"),
        constraints=("qualcomm-*",),
    )
)
