"""SenseTime's STPU: symmetric int8 without its lowest value, one scale per tensor, scales fixed by calibration."""

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.backends.words import IMAGE_OPERATORS

_TENSORS = {
    "spec": "int8 symmetric narrow tensor",
    "formats": ("int8",),
    "schemes": ("symmetric",),
    "narrow": True,
    "method": "FixedFakeQuantize",
}

STPU = register_backend(
    SNPE.with_(
        name="stpu",
        title="SenseTime STPU",
        formats=("stpu", "onnx"),
        constraints=("stpu-*",),
        operators={
            "integer": dict.fromkeys((*IMAGE_OPERATORS, "cat"), "both"),
            "share_inputs": ("cat",),
            "ranges": {"sigmoid": (-1.0, 1.0)},
            "reasons": {},
        },
        weights=_TENSORS,
        activations=_TENSORS,
    )
)
