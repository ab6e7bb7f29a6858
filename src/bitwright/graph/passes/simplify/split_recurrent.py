"""Let recurrent modules quantize their parts:  nn.LSTM  ->  QuantLSTM, with quantizers for inputs, states and weights.

A recurrent module is not taken apart into graph nodes: a graph has a fixed number of steps, and the model would accept
sequences of one length only. Its QModule has the parts inside: at every step the input, the hidden state and the
weights are quantized, one pair of quantizers for each layer and direction, symmetric, weights per row.

Off unless asked for: no runtime here computes a recurrent layer in integers, and a file holds a quantized one step by
step, for sequences of the example's length. Asked for by ``split_recurrent: true``, or with options
``split_recurrent: {bits: 8, keep: ["encoder.lstm"]}``.
"""

from torch import nn

from bitwright.errors import suggest
from bitwright.graph.build import module_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.recurrent import QuantGRU, QuantLSTM, QuantLSTMCell
from bitwright.quantizer import QuantDescriptor, quantizers

_QUANTIZED: dict[type, type] = {nn.LSTM: QuantLSTM, nn.GRU: QuantGRU, nn.LSTMCell: QuantLSTMCell}
_OTHERS = (nn.RNN, nn.RNNCell, nn.GRUCell)


@register_schedule("split_recurrent", stage="simplify", default=False)
def split_recurrent(model: CapturedModel, bits: int = 8, keep: tuple[str, ...] = ()) -> list[str]:
    """Swap every recurrent module that has a quantized form, and name the others.

    Args:
        model: the model.
        bits: how many bits inputs, states and weights have.
        keep: names of modules that stay float.
    """
    notes = []
    swapped: dict[nn.Module, nn.Module] = {}
    found: set[str] = set()
    for node in model.graph.nodes:
        module, name = module_of(node, model), str(node.target)
        if type(module) not in _QUANTIZED and type(module) not in _OTHERS:
            continue
        found.add(name)
        cls = _QUANTIZED.get(type(module))
        if module is None or module in swapped:
            continue
        if cls is None:
            notes.append(f"not split: {name}, there is no quantized {type(module).__name__}")
        elif name in keep:
            notes.append(f"not split: {name}, it is to be kept")
        else:
            swapped[module] = _quantized(cls, module, bits)
            notes.append(f"{name} quantizes its inputs, states and weights")
    unknown = [name for name in keep if name not in found]
    notes += [f"not kept: {name}, no recurrent module has this name{suggest(name, found)}" for name in unknown]
    for parent in list(model.modules()):
        parent._modules.update({n: swapped[m] for n, m in parent._modules.items() if m in swapped})
    return notes


def _quantized(cls: type, module: nn.Module, bits: int) -> nn.Module:
    made = cls.from_float(  # pyrefly: ignore
        module,
        quant_desc_input=QuantDescriptor(num_bits=bits),
        quant_desc_weight=QuantDescriptor(num_bits=bits, axis=0),
    )
    for quantizer in quantizers(made).values():
        quantizer.off()
    return made
