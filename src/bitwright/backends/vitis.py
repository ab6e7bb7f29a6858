"""Xilinx Vitis AI (DPU): symmetric int8 in steps that are powers of two; results are quantized, not inputs."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import RELUS

_TENSORS = {
    "spec": "int8 symmetric pot tensor",
    "formats": ("int8",),
    "granularities": ("tensor",),
    "schemes": ("symmetric",),
    "power_of_two": True,
    "method": "TqtFakeQuantize",
}
_OPERATORS = (
    *("conv2d", "conv_transpose2d", "linear", "avg_pool2d", "adaptive_avg_pool2d"),
    *("batch_norm", "relu", "prelu", "interpolate", "add", "mul", "cat"),
)

VITIS = register_backend(
    Backend.of(
        name="vitis",
        title="Xilinx Vitis AI (DPU)",
        weights={**_TENSORS, "observer": "MinMaxFloorObserver"},
        activations={**_TENSORS, "observer": "PoTModeObserver"},
        integer_bias=False,
        operators={
            "integer": dict.fromkeys(_OPERATORS, "outputs"),
            "fused": RELUS,
            "unfused": ("add", "mul", "cat"),
            "numbers": ("add", "mul"),
        },
        formats=("vitis", "onnx"),
        constraints=("vitis-*",),
        notes=("The network's own input has no quantizer: only results have one.",),
    )
)
