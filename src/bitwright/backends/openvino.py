"""OpenVINO on CPU: u8 activations, s8 weights per channel, Q/DQ ONNX."""

from torch import fx

from bitwright.backends.files import register_backend
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.backends.words import AVERAGE_POOLS, CONVOLUTIONS
from bitwright.graph.facts import facts


def _joins_other_than_channels(node: fx.Node) -> str | None:
    """OpenVINO takes the axis of a quantized concatenation for channels, and computes wrong values where it is not."""
    info = facts(node).tensor
    axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    if info is not None and len(info.shape) >= 4 and axis in (1, 1 - len(info.shape)):
        return None
    return "OpenVINO joins quantized tensors correctly only along the channels of images"


def _adds_a_constant(node: fx.Node) -> str | None:
    """OpenVINO refuses files in which a quantized constant, such as a position embedding, is added."""
    for source in node.all_input_nodes:
        while len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        if source.op == "get_attr":
            return "OpenVINO adds constants in float"
    return None


OPENVINO = register_backend(
    ONNXRUNTIME.with_(
        name="openvino",
        title="OpenVINO on CPU (Q/DQ ONNX)",
        activations={"write_unsigned": False},
        operators={
            "integer": dict.fromkeys((*CONVOLUTIONS, "linear", "add", "cat", *AVERAGE_POOLS), "inputs"),
            "conditions": {"cat": _joins_other_than_channels, "add": _adds_a_constant},
            "share_inputs": ("cat",),
            "reasons": {
                "batch_norm": "no convolution or linear layer before it to fold into",
                "mul": "OpenVINO fuses it with its neighbours in float",
                "matmul": "OpenVINO multiplies two computed tensors in integers only if neither has a zero point",
                "scaled_dot_product_attention": "one fused float operator; its matrix products are not visible yet",
            },
        },
        runtimes=("openvino", "onnxruntime"),
    )
)
