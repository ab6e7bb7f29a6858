"""Make recurrent modules quantize their parts:  nn.LSTM  ->  QuantLSTM, with quantizers for inputs, states and weights.

A recurrent module is not split into graph nodes, because a graph has a fixed number of steps and the model would
accept sequences of only one length. Its QModule has the parts inside: at every step it quantizes the input, the hidden
state and the weights, with one pair of quantizers for each layer and direction, symmetric, weights per row.

Off unless asked for: no runtime here computes ONNX's recurrent operators in integers (OpenVINO refuses them with stored
integers and quantized inputs), and a file holds a quantized one step by step, for sequences of the example's length.
For onnxruntime's own LSTM with integer weights, see ``nn/dynamic_recurrent.py``. Ask for quantized modules with
``split_recurrent: true``, or with options ``split_recurrent: {bits: 8, keep: ["encoder.lstm"]}``.
"""

from typing import Any

from torch import fx, nn

from bitwright.errors import suggest
from bitwright.graph.match import MatcherNode
from bitwright.graph.names import replace_modules
from bitwright.graph.rewriting.replace import Called, Nodes, ReplacePatternBase, ReplaceStrategy
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.recurrent import QuantGRU, QuantLSTM, QuantLSTMCell
from bitwright.quantizer import QuantDescriptor, quantizers

_QUANTIZED: dict[type, type] = {nn.LSTM: QuantLSTM, nn.GRU: QuantGRU, nn.LSTMCell: QuantLSTMCell}
_OTHERS = (nn.RNN, nn.RNNCell, nn.GRUCell)


@register_schedule("split_recurrent", stage="simplify", default=False)
class ReplacePattern(ReplacePatternBase):
    """Swap every recurrent module that has a quantized form, and name the others.

    Args:
        bits: bits of inputs, states and weights.
        keep: names of modules that stay float.
    """

    done = "split"
    strategy = ReplaceStrategy.APPLY_NOINTERSECT

    def __init__(self, bits: int = 8, keep: tuple[str, ...] = ()) -> None:
        self.bits = bits
        self.keep = keep
        self.found: set[str] = set()

    def make_ops(self) -> list[MatcherNode]:
        return [MatcherNode("recurrent", None, [*_QUANTIZED, *_OTHERS], self._may_be_swapped)]

    def get_new_graph(self, nodes_dict: Nodes, modules_dict: Called, model: Any, *_: Any) -> None:
        """Register the quantized module under every name of the float one."""
        module = modules_dict["recurrent"]
        made = _quantized(_QUANTIZED[type(module)], module, self.bits)
        replace_modules(model, {module: made})
        self.note(f"{nodes_dict['recurrent'].target} quantizes its inputs, states and weights")

    def finish(self, model: fx.GraphModule) -> None:
        """Note names to keep that are unknown."""
        for name in self.keep:
            if name not in self.found:
                self.note(f"not kept: {name}, no recurrent module has that name{suggest(name, self.found)}")

    def _may_be_swapped(self, node: fx.Node, module: object) -> bool | str:
        self.found.add(str(node.target))
        if type(module) in _OTHERS:
            return f"there is no quantized {type(module).__name__}"
        if str(node.target) in self.keep:
            return "it is to be kept"
        return type(module) in _QUANTIZED  # or it was already swapped at another call


def _quantized(cls: type, module: nn.Module, bits: int) -> nn.Module:
    made = cls.from_float(  # pyrefly: ignore
        module,
        quant_desc_input=QuantDescriptor(num_bits=bits),
        quant_desc_weight=QuantDescriptor(num_bits=bits, axis=0),
    )
    for quantizer in quantizers(made).values():
        quantizer.off()
    return made
