"""ONNX with QLinear operators: affine uint8, one scale per tensor, only what has such an operator."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import LEARNED, RELUS, average_pools, up_to
from bitwright.spec import QuantSpec

ONNX_QNN = register_backend()(
    Backend(
        name="onnx_qnn",
        title="ONNX QLinear operators (TVM and others)",
        weight=QuantSpec.parse("uint8 affine tensor"),
        activation=QuantSpec.parse("uint8 affine tensor"),
        integer=dict.fromkeys((*(f"conv{d}d" for d in (1, 2, 3)), "add", *average_pools()), "both"),
        fused=RELUS,
        reasons={
            "linear": "there is no QLinear operator for a fully connected layer",
            **{f"conv_transpose{d}d": "there is no QLinear operator for a transposed convolution" for d in (1, 2, 3)},
        },
        weight_formats=up_to(8, "uint"),
        activation_formats=frozenset({"uint8"}),
        weight_grains=frozenset({"tensor"}),
        weight_schemes=frozenset({"affine"}),
        activation_schemes=frozenset({"affine"}),
        runtimes=("onnxruntime",),
        method=LEARNED,
    )
)
