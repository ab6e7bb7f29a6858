"""SenseTime's STPU: symmetric int8 without its lowest value, one scale per tensor, scales fixed by calibration."""

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.backends.words import up_to

_TENSORS = {"spec": "int8 symmetric narrow tensor", "schemes": ("symmetric",), "method": "FixedFakeQuantize"}

STPU = register_backend(
    SNPE.with_(
        name="stpu",
        title="SenseTime STPU",
        formats=("stpu", "onnx"),
        weights={**_TENSORS, "formats": up_to(8)},
        activations={**_TENSORS, "formats": ("int8",)},
    )
)
