"""onnxruntime on x86 CPUs: u8 activations, s8 weights per channel, Q/DQ ONNX."""

from torch import fx

from bitwright.backends.base import Backend, Place
from bitwright.backends.files import register_backend
from bitwright.spec import QuantSpec

_RESULT_QUANTIZED: Place = "both"
_RESULT_FREE: Place = "inputs"


def _is_flat_wrong(node: fx.Node) -> str | None:
    """QLinearSoftmax gives wrong integers where all results are alike, as in attention before training."""
    return "onnxruntime's integer softmax is wrong for flat distributions"


ONNXRUNTIME = register_backend()(
    Backend(
        name="onnxruntime",
        title="onnxruntime on CPU (Q/DQ ONNX)",
        weight=QuantSpec.parse("int7 symmetric narrow channel:0"),
        activation=QuantSpec.parse("uint8 affine tensor"),
        integer={
            **{f"conv{d}d": _RESULT_QUANTIZED for d in (1, 2, 3)},
            # No integer kernel, but onnxruntime quantizes a float weight between quantized tensors by itself, per
            # tensor and unasked; a weight we have quantized, per channel, it leaves alone.
            **{f"conv_transpose{d}d": _RESULT_QUANTIZED for d in (1, 2, 3)},
            "linear": _RESULT_FREE,
            "matmul": _RESULT_FREE,
            "add": _RESULT_QUANTIZED,
            "mul": _RESULT_QUANTIZED,
            "cat": _RESULT_QUANTIZED,
            **{f"avg_pool{d}d": _RESULT_QUANTIZED for d in (1, 2, 3)},
            **{f"adaptive_avg_pool{d}d": _RESULT_QUANTIZED for d in (1, 2, 3)},
            "leaky_relu": _RESULT_QUANTIZED,
            "sigmoid": _RESULT_QUANTIZED,
            "softmax": _RESULT_QUANTIZED,
        },
        conditions={"softmax": _is_flat_wrong},
        fused=frozenset({"relu", "relu6", "clamp"}),
        folds_scales=True,
        reasons={
            "batch_norm": "no convolution or linear layer before it to fold into",
            "hardswish": "onnxruntime has no integer hard-swish",
            "hardsigmoid": "onnxruntime has no integer hard-sigmoid",
            "scaled_dot_product_attention": "one fused float operator; its matrix products are not visible yet",
        },
        weight_formats=frozenset({"int2", "int3", "int4", "int5", "int6", "int7", "int8"}),
        activation_formats=frozenset({"uint8", "int8"}),
        unsigned_activations=True,  # its integer kernels want u8, and its own conversion breaks some files
        weight_bits={8: 7},
        runtimes=("onnxruntime", "openvino"),
        notes=(
            "Weights use 7 of their 8 bits: without VNNI instructions, x86 CPUs add pairs of u8×s8 products in 16 bits "
            "and saturate when both are large. If all your CPUs have VNNI (or are ARM), ask for weight='int8 narrow "
            "channel:0'.",
        ),
    )
)
