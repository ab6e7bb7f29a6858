"""OpenVINO on CPU: u8 activations, s8 weights per channel, Q/DQ ONNX."""

from torch import fx, nn

from bitwright.backends.files import register_backend
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.backends.words import AVERAGE_POOLS, CONVOLUTIONS, RELUS
from bitwright.graph.facts import facts, shape_of
from bitwright.nn.operators.base import Operator, argument, each_dimension, operator_of_module, operator_of_source
from bitwright.nn.operators.moves import PADS_WITH_OWN_VALUES


def _joins_wrongly(node: fx.Node) -> str | None:
    """OpenVINO mistakes the axis of a quantized concatenation for channels, and then computes wrong values.

    It then gives each channel of the result its own scale, and refuses linear layers that read it.
    """
    rank = len(shape_of(node) or ())
    axis = node.kwargs.get("axis", argument(node, None, 1, "dim", 0))
    if rank < 4 or axis not in (1, 1 - rank):
        return "OpenVINO joins quantized tensors correctly only along the channels of images"
    linear = any((kind := _operator(user)) is not None and kind.name == "linear" for user in node.users)
    return "OpenVINO joins quantized tensors for convolutions only" if linear else None


def _adds_a_constant(node: fx.Node) -> str | None:
    """OpenVINO refuses files in which a quantized constant is added, such as an embedding of positions."""
    return "OpenVINO adds constants in float" if any(map(_is_constant, node.all_input_nodes)) else None


def _reads_a_constant(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) applies the scale of a constant repeatedly where several layers read parts of it.

    It then computes with zeros, as in detectors that split their queries into positions and contents.
    """
    source = node.all_input_nodes[0]
    return "OpenVINO computes layers of constants in float" if _is_constant(source) else None


def _multiplies_wrongly(node: fx.Node) -> str | None:
    """OpenVINO takes a product with a constant for a layer, and has no integer kernel for vectors."""
    if any(len(shape_of(operand) or ()) < 2 for operand in node.all_input_nodes):
        return "OpenVINO multiplies vectors in float"
    return "OpenVINO multiplies by constants in float" if any(map(_is_constant, node.all_input_nodes)) else None


def _adds_for_float(node: fx.Node) -> str | None:
    """OpenVINO adds in float, too, and does not round then: only integers before or after are worth a quantized sum.

    Two blocks of a transformer have 5 to 6 dB less noise so.
    """
    if any(map(_comes_in_integers, node.all_input_nodes)):
        return None
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            operator = _operator(user)
            if operator is None or user in seen:
                continue
            joins = operator.name == "cat" and _joins_wrongly(user) is None
            if operator.weight or operator.pool or joins or operator.name == "batch_norm":
                return None
            if operator.name in ("add", *RELUS) or operator.carries_scale(user, _module(user)):
                seen.add(user)
                waiting.append(user)
    return "nothing around it computes in integers"


def _comes_in_integers(node: fx.Node) -> bool:
    """Whether a convolution, pool or concatenation produces a tensor, whose result others may read in integers."""
    while (operator := _operator(node)) is not None:
        if (operator.weight and operator.rank) or operator.pool or operator.name == "cat":
            return operator.name != "cat" or _joins_wrongly(node) is None
        if not (operator.name in (*RELUS, "batch_norm") or operator.carries_scale(node, _module(node))):
            return False
        node = node.all_input_nodes[0]
    return False


def _is_constant(node: fx.Node) -> bool:
    """Whether a tensor does not depend on an input's data, only on parameters, buffers and sizes."""
    waiting, seen = [node], {node}
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder" and not facts(source).plain:
            return False
        if not facts(source).plain:
            waiting += [n for n in reversed(source.all_input_nodes) if n not in seen]  # the first leads to data soonest
            seen.update(source.all_input_nodes)
    return True


def _module(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def _operator(node: fx.Node) -> Operator | None:
    module = _module(node)
    return operator_of_module(module) if module is not None else operator_of_source(node.target)


def _pads_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) mistakes the zero point of a tensor padded along one dimension for one per channel."""
    module = _module(node)
    if argument(node, module, 2, "mode", "constant") != "constant" or isinstance(module, PADS_WITH_OWN_VALUES):
        return None
    if argument(node, module, 3, "value") == float("-inf"):
        return "OpenVINO pads in float with values that are not finite"
    pads = argument(node, module, 1, "pad" if module is None else "padding")
    padded = sum(any(edges) for edges in zip(pads[::2], pads[1::2], strict=True))
    return "OpenVINO pads in float along a single dimension" if padded == 1 else None


def _shuffles_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) gives each joined channel a zero point, and refuses to move those into pixels."""
    source = node.all_input_nodes[0]
    while (operator := _operator(source)) is not None and operator.carries_scale(source, _module(source)):
        source = source.all_input_nodes[0]
    return "OpenVINO shuffles joined tensors in float" if operator is not None and operator.name == "cat" else None


def _counts_padding(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) averages quantized tensors as if the padding held their zero point.

    In ONNX a custom divisor is a factor after the average, which OpenVINO rounds before multiplying.
    """
    module = _module(node)
    if argument(node, module, 6, "divisor_override"):
        return "OpenVINO divides by a number of your own in float"
    padding = argument(node, module, 3, "padding", 0)
    padded = argument(node, module, 4, "ceil_mode", False) or (any(padding) if isinstance(padding, tuple) else padding)
    counted = argument(node, module, 5, "count_include_pad", True)
    return "OpenVINO averages padding in float" if padded and counted else None


def _averages_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) counts the zero points of channels by samples as it reduces sequences; the last miss theirs.

    Sequences that fall into windows of one size are pooled, not reduced.
    """
    shape, source = shape_of(node), shape_of(node.all_input_nodes[0])
    pooled = shape is not None and source is not None and shape[-1] > 1 and source[-1] % shape[-1] == 0
    return None if pooled else "OpenVINO averages sequences wrongly in integers if there are more samples than channels"


def _convolves_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) reads out of bounds where a window lies in the padding, if the zero point is not 0.

    It takes the zero point wrongly into account, for some sizes, where one channel has several results, and computes
    other values of a padded volume with one channel and one slice. It moves the stride of a kernel of size 1 before the
    padding; in float, the exporter takes the stride afterwards.
    """
    module, operator, weight = _module(node), _operator(node), _weight_shape(node)
    shape = shape_of(node.all_input_nodes[0])
    if operator is None or shape is None or weight is None:
        return None
    groups = shape[-operator.rank - 1] // weight[1]  # as an argument, it may be computed
    if 1 < groups < weight[0] and weight[1] == 1:
        return "OpenVINO computes several results of one channel in float"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    kernel, settings = list(weight[2:]), ((3, "stride"), (5, "dilation"))
    strides, dilations = (each_dimension(argument(node, module, *name, 1), operator.rank) for name in settings)
    padding = argument(node, module, 4, "padding", 0)
    if isinstance(padding, fx.Node):
        return "its padding is computed, and OpenVINO convolves some padded tensors wrongly"
    pads = _ends(padding, kernel, dilations)
    sizes, channels = list(shape[-operator.rank :]), shape[-operator.rank - 1]
    return _pads_convolution_wrongly(sizes, channels, kernel, pads, strides, dilations)


def _ends(padding: int | str | tuple[int, ...], kernel: list[int], dilations: list[int]) -> list[tuple[int, int]]:
    """The padding before and after each dimension, from numbers or torch's words."""
    if padding == "same":
        reaches = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
        return [(reach // 2, reach - reach // 2) for reach in reaches]
    return [(pad, pad) for pad in each_dimension(0 if isinstance(padding, str) else padding, len(kernel))]


def _transposes_wrongly(node: fx.Node) -> str | None:
    """OpenVINO (2026.4) loses the bias where some results have no value of the tensor: between narrow kernels."""
    weight, stride = _weight_shape(node), argument(node, _module(node), 3, "stride", 1)
    if weight is None:
        return None
    strides = each_dimension(stride, len(weight) - 2)
    narrow = any(size < step for size, step in zip(weight[2:], strides, strict=True))
    return "OpenVINO transposes convolutions with kernels narrower than their strides in float" if narrow else None


def _pads_convolution_wrongly(
    sizes: list[int],
    channels: int,
    kernel: list[int],
    pads: list[tuple[int, int]],
    strides: list[int],
    dilations: list[int],
) -> str | None:
    if len(sizes) == 3 and channels == 1 and sizes[0] == 1 and any(pads[0]):
        return "OpenVINO convolves a padded single channel of depth 1 in float"
    if set(kernel) == {1} and any(any(p) and s > 1 for p, s in zip(pads, strides, strict=True)):
        return "OpenVINO moves the stride of kernels of size 1 before their padding"
    places = zip(sizes, kernel, pads, strides, dilations, strict=True)
    return "OpenVINO convolves windows of nothing but padding in float" if any(_misses(*p) for p in places) else None


def _misses(size: int, kernel: int, padding: tuple[int, int], stride: int, dilation: int) -> bool:
    """Whether some window along one dimension has none of the tensor's values."""
    first = range(-padding[0], size + padding[1] - dilation * (kernel - 1), stride)
    return any(all(not 0 <= at + dilation * tap < size for tap in range(kernel)) for at in first)


def _weight_shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a convolution's weight."""
    module = _module(node)
    if module is not None:
        weight = getattr(module, "weight", None)
        return None if weight is None else tuple(weight.shape)
    weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None)
    return shape_of(weight) if isinstance(weight, fx.Node) else None


OPENVINO = register_backend(
    ONNXRUNTIME.with_(
        name="openvino",
        title="OpenVINO on CPU (Q/DQ ONNX)",
        activations={"write_unsigned": False},
        operators={
            "integer": dict.fromkeys((*CONVOLUTIONS, "linear", "matmul", "add", "cat", *AVERAGE_POOLS), "inputs"),
            "inputs": {"matmul": "int8 symmetric tensor"},  # it multiplies computed tensors only without zero points
            "wide": {"matmul"},
            "split_attention": True,
            "conditions": {
                "cat": _joins_wrongly,
                "conv?d": _convolves_wrongly,
                "conv_transpose?d": _transposes_wrongly,
                "add": _adds_a_constant,
                "linear": _reads_a_constant,
                "matmul": _multiplies_wrongly,
                "pad": _pads_wrongly,
                "pixel_shuffle": _shuffles_wrongly,
                "avg_pool?d": _counts_padding,
                "adaptive_avg_pool1d": _averages_wrongly,
            },
            "share_inputs": ("cat",),
            "unneeded": {"add": _adds_for_float},
            "float_apart": True,
            "moves_scales": True,
            "dynamic_lstm": False,
            "split_activations": False,
            "norms_as_convolutions": False,
            "scaled_results": False,
            "dequantizes_apart": False,
            "transposed_as_convolutions": False,
            "reasons": {
                "batch_norm": "no convolution or linear layer before it to fold into",
                "mul": "OpenVINO fuses it with its neighbours in float",
                "scaled_dot_product_attention": "one fused float operator; with weights of 8 bits (weight='auto'), "
                "where CPUs have VNNI, its products run in integers",
            },
        },
        formats=("onnx", "openvino"),
        runtimes=("openvino", "onnxruntime"),
    )
)
