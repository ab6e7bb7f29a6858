"""Products: norms that a model writes out, which appear in the graph as x * weight, or x * weight + bias."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx, nn

from bitwright.graph.facts import shape_of
from bitwright.graph.names import attribute_of, module_of
from bitwright.graph.walks import first_input, operator_called, value_readers
from bitwright.quantizer import TensorQuantizer


@dataclass(eq=False)
class Product:
    """A tensor times a Parameter with one value for each position of the last axis, plus another Parameter, if any.

    Attributes:
        name: the name of the Parameter that is multiplied.
        node: the call that computes the result.
        weight: the factor.
        bias: the summand.
        quantizers: those of weight and bias, and between the product and the sum.
    """

    name: str
    node: fx.Node
    weight: nn.Parameter
    bias: nn.Parameter | None = None
    quantizers: list[TensorQuantizer] = field(default_factory=list)


def product_at(node: fx.Node, model: fx.GraphModule) -> Product | None:
    """The product that a call computes, with the sum that follows, or None if it computes something else."""
    times = _Operand.of(node, "mul", model)
    if times is None:
        return None
    found = Product(times.name, node, times.parameter, None, times.quantizers)
    way = list(_on_through_quantizers(node, model))
    plus = _Operand.of(way[-1], "add", model) if len(way) > 1 else None
    if plus is not None and plus.parameter.shape == times.parameter.shape:
        between = [m for m in (module_of(n, model) for n in way) if isinstance(m, TensorQuantizer)]
        found.node, found.bias = way[-1], plus.parameter
        found.quantizers = [*times.quantizers, *between, *plus.quantizers]
    return found


@dataclass
class _Operand:
    """A Parameter of one value per channel that a call multiplies or adds."""

    name: str
    parameter: nn.Parameter
    quantizers: list[TensorQuantizer]

    @classmethod
    def of(cls, node: fx.Node, operator: str, model: fx.GraphModule) -> "_Operand | None":
        kind = operator_called(node, module_of(node, model))
        shape = shape_of(node) or ()
        if kind is None or kind.name != operator or len(node.all_input_nodes) != 2 or not shape:
            return None
        for given, other in (node.all_input_nodes, node.all_input_nodes[::-1]):
            found = cls._read(given, model)
            if found is not None and found.parameter.shape == shape[-1:] and shape_of(other) == shape:
                return found
        return None

    @classmethod
    def _read(cls, node: fx.Node, model: fx.GraphModule) -> "_Operand | None":
        """The Parameter that a node reads, quantized or not."""
        quantizers = []
        while isinstance(quantizer := module_of(node, model), TensorQuantizer):
            quantizers.append(quantizer)
            before = first_input(node)
            if before is None or len(node.users) != 1:
                return None
            node = before
        value = attribute_of(model, str(node.target)) if node.op == "get_attr" else None
        return cls(str(node.target), value, quantizers) if isinstance(value, nn.Parameter) else None


def _on_through_quantizers(node: fx.Node, model: fx.GraphModule) -> Iterator[fx.Node]:
    """A node and its successors, as long as each has one reader, up to the first that is not a quantizer."""
    yield node
    while len(readers := value_readers(node)) == 1:
        node = readers[0]
        yield node
        if not isinstance(module_of(node, model), TensorQuantizer):
            return
