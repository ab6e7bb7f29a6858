"""NVIDIA TensorRT with explicit quantization: symmetric int8, weights per channel."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import IMAGE_OPERATORS, LEARNED, MOVING_RANGE, RELUS, up_to
from bitwright.spec import QuantSpec

TENSORRT = register_backend()(
    Backend(
        name="tensorrt",
        title="NVIDIA TensorRT (Q/DQ ONNX)",
        weight=QuantSpec.parse("int8 symmetric narrow channel:0"),
        activation=QuantSpec.parse("int8 symmetric narrow tensor"),
        integer=dict.fromkeys(IMAGE_OPERATORS, "inputs"),
        fused=RELUS,
        merged={"add": frozenset({"mul"})},
        numbers=frozenset({"add", "mul"}),
        reasons={"cat": "it only gathers: what reads the result quantizes it"},
        weight_formats=up_to(8),
        activation_formats=frozenset({"int8"}),
        activation_schemes=frozenset({"symmetric"}),
        runtimes=("onnxruntime",),
        observer=MOVING_RANGE,
        method=LEARNED,
        notes=("The engine is built by TensorRT from the file; onnxruntime executes the same file here, as a check.",),
    )
)
