"""QuantLSTM, QuantGRU and QuantLSTMCell: inputs, hidden states and weights quantized at every step.

Each layer and direction has one input quantizer, for its input and its hidden state, and one weight quantizer, for all
its weights but the projection (proj_size), which stays float. With all quantizers off the original runs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bitwright.nn import cells
from bitwright.nn.descriptors import TakesDescriptors
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.recurrence import run
from bitwright.nn.registry import register_qmodule

State = tuple[Tensor, ...]


def active(quantizer: Any) -> bool:  # noqa: ANN401
    """Whether a quantizer does anything; one that is deployed always does."""
    return getattr(quantizer, "quantizes", True) or quantizer.observes


class _Recurrent(TakesDescriptors, QuantMixin):
    by_default = True
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    def _places(self) -> int:
        """How many layers and directions there are, each with a pair of quantizers."""
        layers: Any = self
        return layers.num_layers * (2 if layers.bidirectional else 1)

    def is_active(self) -> bool:
        """Whether any quantizer of this module does anything."""
        return any(active(q) for q in (*self._input_quantizers, *self._weight_quantizers))

    def floats_of(self, rnn: Any, place: int) -> list[Any]:  # noqa: ANN401
        """Weights and biases of one layer in one direction: w_ih, w_hh, b_ih, b_hh, w_hr."""
        directions = 2 if rnn.bidirectional else 1
        suffix = f"l{place // directions}" + ("_reverse" if place % directions else "")
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
        return [getattr(rnn, f"{n}_{suffix}", None) for n in names]

    def stored_weights(self) -> dict[str, Tensor]:
        """The weights of each layer and direction by the names of their quantizers."""
        pairs = [self.floats_of(self, place)[:2] for place in range(self._places())]
        return {f"_weight_quantizers.{place}": torch.cat(pair, 1) for place, pair in enumerate(pairs)}

    def weights_of(self, rnn: nn.RNNBase, place: int) -> list[Tensor | None]:
        """The same as :meth:`floats_of` with the weights quantized."""
        w_ih, w_hh, b_ih, b_hh, w_hr = self.floats_of(rnn, place)
        quantizer = self._weight_quantizers[place]
        # The rows of both weights are the same gates, so they have one scale per row.
        columns = [w_ih.shape[1], w_hh.shape[1]]
        w_ih, w_hh = torch.split(quantizer(torch.cat([w_ih, w_hh], 1)), columns, 1)
        return [w_ih, w_hh, b_ih, b_hh, w_hr]

    def layers(self, rnn: nn.RNNBase, data: Tensor, sizes: list[int], start: State) -> tuple[Tensor, State]:
        """Run all layers; ``start`` and the state returned have a first dimension of layers times directions."""
        directions = 2 if rnn.bidirectional else 1
        ends: list[State] = []
        for layer in range(rnn.num_layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                cell = self.cell(self._input_quantizers[place], self.weights_of(rnn, place))
                state = tuple(s[place] for s in start)
                out, end = run(cell, self._input_quantizers[place](data), sizes, state, reverse=direction == 1)
                outputs.append(out)
                ends.append(end)
            data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if rnn.dropout and layer < rnn.num_layers - 1:
                data = F.dropout(data, rnn.dropout, rnn.training)
        return data, tuple(torch.stack([e[i] for e in ends]) for i in range(len(start)))

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Any:  # noqa: ANN401
        """The step function of one layer in one direction."""
        raise NotImplementedError(f"{type(self).__name__} must say what a step is")

    def start(self, rnn: nn.RNNBase, given: Any, batch: int, like: Tensor) -> State:  # noqa: ANN401
        """The states to start from, (layers × directions, batch, size) each."""
        if given is not None:
            return given if isinstance(given, tuple) else (given,)
        sizes = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 2 if rnn.mode == "LSTM" else 1]
        return tuple(like.new_zeros(self._places(), batch, size) for size in sizes)

    def step_by_step(self, rnn: nn.RNNBase, input: Any, hx: Any) -> tuple[Any, State]:  # noqa: ANN401
        """Run over any kind of input the original takes."""
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            sizes = batch_sizes.tolist()
            start = self.start(rnn, hx, sizes[0], data)
            if hx is not None and order is not None:
                start = tuple(s.index_select(1, order) for s in start)
            out, end = self.layers(rnn, data, sizes, start)
            if back is not None:
                end = tuple(s.index_select(1, back) for s in end)
            return PackedSequence(out, batch_sizes, order, back), end
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)  # (T, 1, F)
        if batched and rnn.batch_first:
            x = x.transpose(0, 1)
        steps, batch = x.shape[0], x.shape[1]
        start = self.start(rnn, hx, batch, x)
        if not batched and hx is not None:
            start = tuple(s.unsqueeze(1) for s in start)
        out, end = self.layers(rnn, x.reshape(steps * batch, -1), [batch] * steps, start)
        out = out.reshape(steps, batch, -1)
        if not batched:
            return out.squeeze(1), tuple(s.squeeze(1) for s in end)
        return out.transpose(0, 1) if rnn.batch_first else out, end


@register_qmodule(sources=[nn.LSTM])
class QuantLSTM(_Recurrent, nn.LSTM):
    """nn.LSTM with quantized inputs, hidden states and weights; all arguments and kinds of input of the original."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: ANN401
        """Run the original, or all steps quantized."""
        if not self.is_active():
            return nn.LSTM.forward(self, input, hx)
        return self.step_by_step(self, input, hx)

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Any:  # noqa: ANN401
        """An LSTM's step, with the projection if there is one."""
        *four, projection = weights

        def step(x: Tensor, state: State) -> State:
            h, c = cells.lstm(x, (quantizer(state[0]), state[1]), *four)
            return (h if projection is None else F.linear(h, projection)), c

        return step


@register_qmodule(sources=[nn.GRU])
class QuantGRU(_Recurrent, nn.GRU):
    """nn.GRU with quantized inputs, hidden states and weights; all arguments and kinds of input of the original."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: ANN401
        """Run the original, or all steps quantized."""
        if not self.is_active():
            return nn.GRU.forward(self, input, hx)
        out, (end,) = self.step_by_step(self, input, hx)
        return out, end

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Any:  # noqa: ANN401
        """A GRU's step."""
        return lambda x, state: (cells.gru(x, quantizer(state[0]), state[0], *weights[:4]),)


@register_qmodule(sources=[nn.LSTMCell])
class QuantLSTMCell(TakesDescriptors, QuantMixin, nn.LSTMCell):
    """nn.LSTMCell with a quantized input, hidden state and weights: one quantizer for both tensors of each kind."""

    by_default = True

    def stored_weights(self) -> dict[str, Tensor]:
        """Both weights side by side, as they are quantized."""
        return {"_weight_quantizer": torch.cat([self.weight_ih, self.weight_hh], 1)}

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Make one step."""
        if not (active(self.input_quantizer) or active(self.weight_quantizer)):
            return nn.LSTMCell.forward(self, input, hx)
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        both = self.weight_quantizer(torch.cat([self.weight_ih, self.weight_hh], 1))
        w_ih, w_hh = torch.split(both, [self.input_size, self.hidden_size], 1)
        state = (self.input_quantizer(hx[0]), hx[1])
        h, c = cells.lstm(self.input_quantizer(input), state, w_ih, w_hh, self.bias_ih, self.bias_hh)
        return h, c
