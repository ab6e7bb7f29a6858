"""QuantLSTM, QuantGRU and QuantLSTMCell: inputs, hidden states and weights quantized at every step.

Each layer and direction has one input quantizer, for its input and its hidden state, and one weight quantizer, for all
its weights but the projection (proj_size), which stays float. With all quantizers off the original runs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bitwright.nn.mixins import QuantMixin, TakesDescriptors
from bitwright.nn.registry import register_qmodule

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State], State]


def _mapped(function: Callable[[Tensor], Tensor], state: State) -> State:
    return tuple(function(s) for s in state)


def active(quantizer: Any) -> bool:  # noqa: ANN401
    """Whether a quantizer does anything; a deployed one always does."""
    return getattr(quantizer, "quantizes", True) or quantizer.observes


def ranged(quantizer: object) -> bool:
    """Whether tensors can be quantized one by one; if not, a step's input and hidden state share one range."""
    return not active(quantizer) or getattr(quantizer, "calibrated", True)


def step_inputs(quantizer: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """The input and the hidden state of a step, quantized; with a range, the input already is."""
    if ranged(quantizer):
        return x, quantizer(h)
    x, h = torch.split(quantizer(torch.cat([x, h], -1)), [x.shape[-1], h.shape[-1]], -1)
    return x, h


class _Recurrent(TakesDescriptors, QuantMixin, nn.RNNBase):
    by_default = True
    bias: Any  # whether there are biases, which have another name
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    def _places(self) -> int:
        """The number of layers times directions, each with a pair of quantizers."""
        return self.num_layers * (2 if self.bidirectional else 1)

    def is_active(self) -> bool:
        return any(active(q) for q in (*self._input_quantizers, *self._weight_quantizers))

    def floats_of(self, place: int) -> list[Any]:
        """Weights and biases of one layer in one direction: w_ih, w_hh, b_ih, b_hh, w_hr."""
        directions = 2 if self.bidirectional else 1
        suffix = f"l{place // directions}" + ("_reverse" if place % directions else "")
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
        return [getattr(self, f"{n}_{suffix}", None) for n in names]

    def stored_weights(self) -> dict[str, Tensor]:
        pairs = [self.floats_of(place)[:2] for place in range(self._places())]
        return {f"_weight_quantizers.{place}": torch.cat(pair, 1) for place, pair in enumerate(pairs)}

    def weights_of(self, place: int) -> list[Tensor | None]:
        """The same as :meth:`floats_of` with the weights quantized."""
        w_ih, w_hh, b_ih, b_hh, w_hr = self.floats_of(place)
        quantizer = self._weight_quantizers[place]
        # The rows of both weights are the same gates, so they have one scale per row.
        columns = [w_ih.shape[1], w_hh.shape[1]]
        w_ih, w_hh = torch.split(quantizer(torch.cat([w_ih, w_hh], 1)), columns, 1)
        return [w_ih, w_hh, b_ih, b_hh, w_hr]

    def layers(self, data: Tensor, sizes: list[int], start: State) -> tuple[Tensor, State]:
        """Run all layers; ``start`` and the state returned have a first dimension of layers times directions."""
        directions = 2 if self.bidirectional else 1
        ends: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                quantizer = self._input_quantizers[place]
                cell, given = self.begin(quantizer, self.weights_of(place), data)
                state = tuple(s[place] for s in start)
                out, end = run(cell, given, sizes, state, reverse=direction == 1)
                outputs.append(out)
                ends.append(end)
            data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if self.dropout and layer < self.num_layers - 1:
                data = F.dropout(data, self.dropout, self.training)
        return data, tuple(torch.stack([e[i] for e in ends]) for i in range(len(start)))

    def begin(self, quantizer: nn.Module, weights: list[Any], data: Tensor) -> tuple[Cell, Tensor]:
        """The step function of one layer in one direction, and its data: all steps one after the other."""
        return self.cell(quantizer, weights), quantizer(data) if ranged(quantizer) else data

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Cell:
        """The step function on quantized inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define one step")

    def start(self, given: Any, batch: int, like: Tensor) -> State:  # noqa: ANN401
        """The states to start from, (layers × directions, batch, size) each."""
        if given is not None:
            return given if isinstance(given, tuple) else (given,)
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][: 2 if self.mode == "LSTM" else 1]
        return tuple(like.new_zeros(self._places(), batch, size) for size in sizes)

    def step_by_step(self, input: Any, hx: Any) -> tuple[Any, State]:  # noqa: ANN401
        """Run over any kind of input that the original accepts."""
        if isinstance(input, PackedSequence):
            return self._over_packed(input, hx)
        if input.dim() == 2:  # one sequence, (T, F)
            start = self.start(hx, 1, input)
            start = start if hx is None else _mapped(lambda s: s.unsqueeze(1), start)
            out, end = self.layers(input, [1] * input.shape[0], start)
            return out, _mapped(lambda s: s.squeeze(1), end)
        x = input.transpose(0, 1) if self.batch_first else input
        steps, batch = x.shape[0], x.shape[1]
        out, end = self.layers(x.reshape(steps * batch, -1), [batch] * steps, self.start(hx, batch, x))
        out = out.reshape(steps, batch, -1)
        return out.transpose(0, 1) if self.batch_first else out, end

    def _over_packed(self, input: PackedSequence, hx: object) -> tuple[PackedSequence, State]:
        data, batch_sizes, order, back = input
        sizes = batch_sizes.tolist()
        start = self.start(hx, sizes[0], data)
        if hx is not None and order is not None:
            start = _mapped(lambda s: s.index_select(1, order), start)
        out, end = self.layers(data, sizes, start)
        if back is not None:
            end = _mapped(lambda s: s.index_select(1, back), end)
        return PackedSequence(out, batch_sizes, order, back), end


@register_qmodule(sources=[nn.LSTM])
class QuantLSTM(_Recurrent, nn.LSTM):
    """nn.LSTM with quantized inputs, hidden states and weights; takes all arguments and inputs of the original."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: ANN401
        if not self.is_active():
            return nn.LSTM.forward(self, input, hx)
        return self.step_by_step(input, hx)

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Cell:
        *four, projection = weights

        def step(x: Tensor, state: State) -> State:
            x, h = step_inputs(quantizer, x, state[0])
            h, c = lstm_step(x, (h, state[1]), *four)
            return (h if projection is None else F.linear(h, projection)), c

        return step


@register_qmodule(sources=[nn.GRU])
class QuantGRU(_Recurrent, nn.GRU):
    """nn.GRU with quantized inputs, hidden states and weights; takes all arguments and inputs of the original."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: ANN401
        if not self.is_active():
            return nn.GRU.forward(self, input, hx)
        out, (end,) = self.step_by_step(input, hx)
        return out, end

    def cell(self, quantizer: nn.Module, weights: list[Any]) -> Cell:
        return lambda x, state: (gru_step(*step_inputs(quantizer, x, state[0]), state[0], *weights[:4]),)


@register_qmodule(sources=[nn.LSTMCell])
class QuantLSTMCell(TakesDescriptors, QuantMixin, nn.LSTMCell):
    """nn.LSTMCell with a quantized input, hidden state and weights: one quantizer for both tensors of each kind."""

    by_default = True

    def stored_weights(self) -> dict[str, Tensor]:
        return {"_weight_quantizer": torch.cat([self.weight_ih, self.weight_hh], 1)}

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        if not (active(self.input_quantizer) or active(self.weight_quantizer)):
            return nn.LSTMCell.forward(self, input, hx)
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros)
        both = self.weight_quantizer(torch.cat([self.weight_ih, self.weight_hh], 1))
        w_ih, w_hh = torch.split(both, [self.input_size, self.hidden_size], 1)
        quantizer = self.input_quantizer
        x, h = step_inputs(quantizer, quantizer(input) if ranged(quantizer) else input, hx[0])
        h, c = lstm_step(x, (h, hx[1]), w_ih, w_hh, self.bias_ih, self.bias_hh)
        return h, c


def lstm_step(x: Tensor, state: State, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> State:
    """One step of an LSTM: (h, c) -> (h', c'); the hidden state may be quantized, the cell's is not.

    i, f, g, o = W_ih x + b_ih + W_hh h + b_hh,   c' = σ(f) c + σ(i) tanh(g),   h' = σ(o) tanh(c')
    """
    h, c = state
    return lstm_gates(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def lstm_gates(sums: Tensor, c: Tensor) -> State:
    """The next state, given the sums of the four gates and the cell's state."""
    i, f, g, o = sums.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_step(
    x: Tensor, h: Tensor, kept: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensor:
    """One step of a GRU on a hidden state ``h`` that may be quantized; ``kept`` is the same in full precision.

    r, z = σ(W x + b + W' h + b'),   n = tanh(W_n x + b_n + r (W'_n h + b'_n)),   h' = (1 - z) n + z h
    """
    r_x, z_x, n_x = F.linear(x, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    z = torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return (1 - z) * n + z * kept


def run(cell: Cell, data: Tensor, sizes: list[int], start: State, *, reverse: bool) -> tuple[Tensor, State]:
    """Run a cell over steps of shrinking batch size, longest sequences first.

    Args:
        cell: from an input (b, features) and a state of tensors (b, …) to the next state, the first being the output.
        data: all steps one after the other, (sum of sizes, features).
        sizes: the number of sequences still running at each step.
        start: the state of all sequences, (B, …) each.
        reverse: whether to run from each sequence's last step to its first.

    Returns:
        The outputs, laid out as ``data``, and the last state of each sequence.
    """
    steps = list(torch.split(data, sizes))
    outputs: list[Tensor] = [data] * len(steps)
    first = sizes[-1 if reverse else 0]
    state = _mapped(lambda s: s[:first], start)
    ended: list[State] = []
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        going = sizes[t]
        if going > state[0].shape[0]:  # backwards, shorter sequences join in
            state = _joined(state, tuple(s[state[0].shape[0] : going] for s in start))
        elif going < state[0].shape[0]:  # forwards, they leave
            ended.append(tuple(s[going:] for s in state))
            state = tuple(s[:going] for s in state)
        state = cell(steps[t], state)
        outputs[t] = state[0]
    return torch.cat(outputs), _joined(state, *reversed(ended)) if ended else state


def _joined(*states: State) -> State:
    """The states of several groups of sequences as one."""
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))
