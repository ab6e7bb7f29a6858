"""ONNX with QLinear operators: affine uint8, one scale per tensor, only operators that have one."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import AVERAGE_POOLS, LEARNED, RELUS, up_to

_TENSORS = {"spec": "uint8 affine tensor", "schemes": ("affine",), "method": LEARNED}

ONNX_QNN = register_backend(
    Backend.of(
        name="onnx_qnn",
        title="ONNX QLinear operators (TVM and others)",
        weights={**_TENSORS, "formats": up_to(8, "uint"), "granularities": ("tensor",)},
        activations={**_TENSORS, "formats": ("uint8",)},
        operators={
            "integer": dict.fromkeys(("conv?d", "add", *AVERAGE_POOLS), "both"),
            "fused": RELUS,
            "reasons": {
                "linear": "there is no QLinear operator for a fully connected layer",
                "conv_transpose?d": "there is no QLinear operator for a transposed convolution",
            },
        },
        formats=("onnx", "qoperator", "qualcomm-0.6.1", "qualcomm-1.0.0", "qualcomm-2.0.0"),
        constraints=("qlinear-*",),
        runtimes=("onnxruntime",),
    )
)
