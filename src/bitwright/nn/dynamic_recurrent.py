"""DynamicLSTM: an LSTM with integer weights that finds the range of each tensor it multiplies as it runs.

It computes what onnxruntime's DynamicQuantizeLSTM does. Each layer and direction quantizes its whole input, all steps
of all sequences, to u8 with the input's own range, and at every step the hidden states of all sequences with theirs:

    W x + R h  ->  (s_x s_W) (W_q x_q) + (s_h s_R) (R_q h_q)

W and R have their own scales, one per row. Biases, gates and the cell's state stay float.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.recurrent import Cell, QuantLSTM, State, lstm_gates
from bitwright.nn.registry import adopt
from bitwright.quantizer import TensorQuantizer

INPUTS = "uint8 affine tensor"
_LEAST = 2**15  # weights per layer; below this, onnxruntime is faster in float


def why_not_dynamic(module: nn.LSTM) -> str:
    """Why a module has no integer form, or nothing."""
    if module.proj_size:
        return "onnxruntime has no integer LSTM with projections"
    if module.weight_ih_l0.dtype != torch.float32:
        return f"onnxruntime has no integer LSTM in {module.weight_ih_l0.dtype}"
    layers = module.num_layers * (2 if module.bidirectional else 1)
    size = sum(weight.numel() for name, weight in module.named_parameters() if name.startswith("weight_"))
    return "too small: onnxruntime computes it faster in float" if size < _LEAST * layers else ""


class DynamicLSTM(QuantLSTM):
    """nn.LSTM with stored integer weights and dynamic ranges; float unless all its quantizers quantize."""

    @classmethod
    def of(cls, module: nn.LSTM, name: str, weight: Callable[[str], TensorQuantizer]) -> Self:
        """Build one from a float LSTM; ``weight`` creates the quantizer for a weight's name."""
        made: Self = adopt(cls, module)
        places = range(made._places())
        made._input_quantizers = nn.ModuleList(_dynamic(f"input and states of {name}") for _ in places)
        made._weight_quantizers = nn.ModuleList(weight(f"{name}.{own}") for own in made.weight_names())
        return made

    def weight_names(self) -> list[str]:
        """The names of the weights, alternating between inputs and hidden states."""
        return [name for name in self._flat_weights_names if name.startswith("weight_")]

    def is_active(self) -> bool:
        return all(q.quantizes for q in (*self._input_quantizers, *self._weight_quantizers))  # pyrefly: ignore

    def stored_weights(self) -> dict[str, Tensor]:
        return {f"_weight_quantizers.{i}": getattr(self, name) for i, name in enumerate(self.weight_names())}

    def weights_of(self, place: int) -> list[Tensor | None]:
        w_ih, w_hh, *rest = self.floats_of(place)
        return [self._weight_quantizers[2 * place](w_ih), self._weight_quantizers[2 * place + 1](w_hh), *rest]

    def begin(self, quantizer: nn.Module, weights: list[Any], data: Tensor) -> tuple[Cell, Tensor]:
        """The step function reads the product of the whole input."""
        w_ih, w_hh, b_ih, b_hh, _ = weights

        def step(sums: Tensor, state: State) -> State:
            sums = sums + _product(quantizer(state[0]), w_hh)
            return lstm_gates(sums if b_ih is None else sums + (b_ih + b_hh), state[1])

        return step, _product(quantizer(data), w_ih)


def _dynamic(label: str) -> TensorQuantizer:
    made = TensorQuantizer(INPUTS, dynamic=True)
    made.fixed, made.label = True, label  # calibration leaves it dynamic
    return made


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """The product without rounding of sums, as with integers."""
    return F.linear(x.double(), weight.double()).float()
