"""onnxruntime on x86 CPUs: u8 activations, s8 weights per channel, Q/DQ ONNX."""

from torch import fx

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import AVERAGE_POOLS, CONVOLUTIONS, RELUS, up_to


def _wrong_where_flat(node: fx.Node) -> str:
    """QLinearSoftmax returns wrong integers if all results are alike, as in attention before training."""
    return "onnxruntime's integer softmax is wrong for flat distributions"


# Attention stays float by default. Two blocks of width 192, CPU time in one thread, with its products in integers and
# without: 197 tokens 2.98 and 3.04 ms, 128 tokens 1.70 and 1.71 ms, with a mask 1.94 and 1.82 ms, at equal noise; in
# OpenVINO 3.28 and 3.32, 1.86 and 1.89, 2.06 and 2.04 ms. Also, the decomposed model differs in bits from the float one
# while quantizers are off. Softmax stays float.
SPLIT_ATTENTION = "schedules: {decompose_attention: true} shows its products"

# Six convolutions with an activation after each, CPU time in one thread, float activations and split ones: SiLU 0.514
# and 0.437 ms (128 channels, 28x28), 0.133 and 0.118 (480, 6x6, every other one depthwise); hard-swish 0.392 and 0.333,
# 0.111 and 0.101 ms.
_NOT_SPLIT = ", and it was not split (split_activations in the notes says why)"

# Transposed convolutions have no integer kernel: files have convolutions in their place (see exporting/interleaved.py).
# Those that cannot be written that way stay between quantizers. onnxruntime quantizes a float weight there unasked, per
# tensor. A weight that Bitwright has quantized, per channel, it leaves alone.
_RESULT_QUANTIZED = (*CONVOLUTIONS, "add", "mul", "cat", *AVERAGE_POOLS, "leaky_relu", "sigmoid", "softmax")
_RESULT_FREE = ("linear", "matmul")

ONNXRUNTIME = register_backend(
    Backend.of(
        name="onnxruntime",
        title="onnxruntime on CPU (Q/DQ ONNX)",
        weights={"spec": "int7 symmetric narrow channel:0", "formats": up_to(8), "used_bits": {8: 7}},
        activations={
            "spec": "uint8 affine tensor",
            "formats": ("uint8", "int8"),
            "write_unsigned": True,  # its integer kernels expect u8, and its own conversion breaks some files
        },
        operators={
            "integer": dict.fromkeys(_RESULT_QUANTIZED, "both") | dict.fromkeys(_RESULT_FREE, "inputs"),
            "fused": RELUS,
            "conditions": {"softmax": _wrong_where_flat},
            "transposed_as_convolutions": True,
            "dynamic_lstm": True,
            "split_activations": True,
            "norms_as_convolutions": True,
            "scaled_results": True,
            "dequantizes_apart": True,
            "reasons": {
                "batch_norm": "no convolution or linear layer before it to fold into",
                "hardswish": "onnxruntime has no integer hard-swish" + _NOT_SPLIT,
                "hardsigmoid": "onnxruntime has no integer hard-sigmoid" + _NOT_SPLIT,
                "silu": "onnxruntime has no integer SiLU" + _NOT_SPLIT,
                "scaled_dot_product_attention": "one fused float operator; " + SPLIT_ATTENTION,
            },
        },
        folding={"constants": True},
        formats=("onnx", "qoperator"),
        runtimes=("onnxruntime", "openvino"),
        notes=(
            "Weights use 7 of their 8 bits: without VNNI instructions, x86 CPUs add pairs of u8×s8 products in 16 bits "
            "and saturate when both are large. If all your CPUs have VNNI (or are ARM), ask for weight='int8 narrow "
            "channel:0'.",
        ),
    )
)
