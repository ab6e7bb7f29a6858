"""Signs: which tensors of a graph cannot be negative, whatever the input."""

from torch import fx, nn

from bitwright.graph.names import module_of
from bitwright.graph.walks import operator_called
from bitwright.quantizer import TensorQuantizer

_POSITIVE = ("sigmoid", "hardsigmoid", "softmax", "softplus")
_KEEP = ("add", "mul", "cat", "mean", "dropout", "identity")


def never_negative(tensor: fx.Node, model: fx.GraphModule) -> bool:
    """Whether no value of a tensor can be below 0."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        node = waiting.pop()
        module = module_of(node, model)
        if _is_positive(node, module):
            continue
        if not _keeps_signs(node, module) or not node.all_input_nodes or _has_negative_number(node):
            return False
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return True


def _is_positive(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operator returns nothing below 0, whatever it is given."""
    kind = None if isinstance(module, TensorQuantizer) else operator_called(node, module)
    if kind is None:
        return False
    lowest = (kind.limits_of(node, module) or (None,))[0]
    return kind.name in _POSITIVE or (lowest is not None and lowest >= 0.0)


def _keeps_signs(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operator returns nothing below 0 if it is given nothing below 0."""
    if isinstance(module, TensorQuantizer):
        return True
    kind = operator_called(node, module)
    return kind is not None and bool(kind.name in _KEEP or kind.pool or kind.carries_scale(node, module))


def _has_negative_number(node: fx.Node) -> bool:
    """Whether a sum or product has a number below 0 as one of its terms."""
    return any(isinstance(each, int | float) and each < 0 for each in (*node.args, *node.kwargs.values()))
