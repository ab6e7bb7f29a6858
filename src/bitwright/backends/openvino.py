"""OpenVINO on CPU: u8 activations, s8 weights per channel, Q/DQ ONNX."""

from torch import fx, nn

from bitwright.backends.files import register_backend
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.backends.words import AVERAGE_POOLS, CONVOLUTIONS
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.walks import needed_for
from bitwright.nn.operators.base import argument
from bitwright.nn.operators.moves import PADS_WITH_OWN_VALUES


def _joins_other_than_channels(node: fx.Node) -> str | None:
    """OpenVINO takes the axis of a quantized concatenation for channels, and computes wrong values where it is not."""
    rank = len(shape_of(node) or ())
    axis = node.kwargs.get("axis", argument(node, None, 1, "dim", 0))
    if rank >= 4 and axis in (1, 1 - rank):
        return None
    return "OpenVINO joins quantized tensors correctly only along the channels of images"


def _adds_a_constant(node: fx.Node) -> str | None:
    """OpenVINO refuses files in which a quantized constant is added, such as an embedding of positions."""
    return "OpenVINO adds constants in float" if any(map(_is_constant, node.all_input_nodes)) else None


def _is_constant(node: fx.Node) -> bool:
    """Whether a tensor is computed from no input's data: from parameters, buffers and sizes alone."""
    computed = needed_for([node], lambda n: not facts(n).plain)
    return not any(n.op == "placeholder" for n in computed)


def _module(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def _pads_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) takes the zero point of a tensor padded along one dimension for one of each channel."""
    module = _module(node)
    if argument(node, module, 2, "mode", "constant") != "constant" or isinstance(module, PADS_WITH_OWN_VALUES):
        return None
    if argument(node, module, 3, "value") == float("-inf"):
        return "OpenVINO pads in float with values that are not finite"
    pads = argument(node, module, 1, "pad" if module is None else "padding")
    padded = sum(any(edges) for edges in zip(pads[::2], pads[1::2], strict=True))
    return "OpenVINO pads in float along a single dimension" if padded == 1 else None


def _counts_padding(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) averages quantized tensors as if the padding held their zero point."""
    module = _module(node)
    padding = argument(node, module, 3, "padding", 0)
    padded = argument(node, module, 4, "ceil_mode", False) or (any(padding) if isinstance(padding, tuple) else padding)
    counted = argument(node, module, 5, "count_include_pad", True) or argument(node, module, 6, "divisor_override")
    return "OpenVINO averages padding in float" if padded and counted else None


OPENVINO = register_backend(
    ONNXRUNTIME.with_(
        name="openvino",
        title="OpenVINO on CPU (Q/DQ ONNX)",
        activations={"write_unsigned": False},
        operators={
            "integer": dict.fromkeys((*CONVOLUTIONS, "linear", "add", "cat", *AVERAGE_POOLS), "inputs"),
            "conditions": {
                "cat": _joins_other_than_channels,
                "add": _adds_a_constant,
                "pad": _pads_wrongly,
                "avg_pool?d": _counts_padding,
            },
            "share_inputs": ("cat",),
            "reasons": {
                "batch_norm": "no convolution or linear layer before it to fold into",
                "mul": "OpenVINO fuses it with its neighbours in float",
                "matmul": "OpenVINO multiplies two computed tensors in integers only if neither has a zero point",
                "scaled_dot_product_attention": "one fused float operator, and its products would be float, too",
            },
        },
        formats=("onnx", "openvino"),
        runtimes=("openvino", "onnxruntime"),
    )
)
