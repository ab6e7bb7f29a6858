"""NVIDIA TensorRT with explicit quantization: symmetric int8, weights per channel."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import IMAGE_OPERATORS, LEARNED, MOVING_RANGE, RELUS, up_to

TENSORRT = register_backend(
    Backend.of(
        name="tensorrt",
        title="NVIDIA TensorRT (Q/DQ ONNX)",
        weights={"spec": "int8 symmetric narrow channel:0", "formats": up_to(8), "method": LEARNED},
        activations={
            "spec": "int8 symmetric narrow tensor",
            "formats": ("int8",),
            "schemes": ("symmetric",),
            "observer": MOVING_RANGE,
            "method": LEARNED,
        },
        integer_bias=False,  # TensorRT's parser refuses to dequantize int32
        operators={
            "integer": dict.fromkeys(IMAGE_OPERATORS, "inputs"),
            "fused": RELUS,
            "merged": {"add": ("mul",)},
            "absorbed": {"add": ("conv?d",)},
            "numbers": ("add", "mul"),
            "reasons": {"cat": "it only gathers: what reads the result quantizes it"},
        },
        formats=("onnx", "tensorrt-ranges"),
        constraints=("tensorrt-*",),
        runtimes=("onnxruntime",),
        notes=("The engine is built by TensorRT from the file; onnxruntime executes the same file here, as a check.",),
    )
)
