"""A deployed LSTM: one operator per layer, which a format writes with integer weights and dynamic ranges."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.exporting.parts import Site, as_integers
from bitwright.nn.dynamic_recurrent import DynamicLSTM
from bitwright.numerics.kernel_operator import LIBRARY

LIBRARY.define(
    "dynamic_lstm(Tensor x, Tensor? h, Tensor? c, Tensor[] weights, Tensor? bias, int size) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("bitwright::dynamic_lstm", lib=LIBRARY)
def _(
    x: Tensor, h: Tensor | None, c: Tensor | None, weights: list[Tensor], bias: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, directions = x.shape[0], x.shape[1], len(weights) // 2
    end = x.new_empty(directions, batch, size)
    return x.new_empty(steps, directions, batch, size), end, torch.empty_like(end)


class DeployedLSTM(nn.Module):
    """An LSTM with integer weights."""

    def __init__(self, layer: DynamicLSTM, sites: Sequence[Site | None]) -> None:
        super().__init__()
        self._layer = (layer,)
        self.names = layer.weight_names()
        quantizers: Any = layer._weight_quantizers
        for name, quantizer, site in zip(self.names, quantizers, sites, strict=True):
            stored: Any = as_integers(getattr(layer, name), quantizer, site)
            stored.packs = False
            self.add_module(name, stored)
        directions = 2 if layer.bidirectional else 1
        for number in range(layer.num_layers):
            places = range(number * directions, (number + 1) * directions)
            self.register_buffer(f"bias_{number}", _biases(layer, places) if layer.bias else None)

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Run all layers, as the prepared model does unless it is being exported."""
        (layer,) = self._layer
        if getattr(self, self.names[0]).number is None:
            return layer(input, hx)
        if not isinstance(input, Tensor):
            raise ExportError("a file cannot hold packed sequences: give the LSTM padded ones")
        if input.dim() == 2:  # no batch: (T, F)
            out, ends = self._layers(input.unsqueeze(1), None if hx is None else [state.unsqueeze(1) for state in hx])
            return out.squeeze(1), (ends[0].squeeze(1), ends[1].squeeze(1))
        out, ends = self._layers(input.transpose(0, 1) if layer.batch_first else input, hx)
        return out.transpose(0, 1) if layer.batch_first else out, ends

    def _layers(self, x: Tensor, states: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layer = self._layer[0]
        directions = 2 if layer.bidirectional else 1
        ends: list[tuple[Tensor, Tensor]] = []
        for number in range(layer.num_layers):
            first = number * directions
            h, c = (None, None) if states is None else (s[first : first + directions] for s in states)
            weights = [getattr(self, name)() for name in self.names[2 * first : 2 * (first + directions)]]
            bias = getattr(self, f"bias_{number}")
            y, *end = torch.ops.bitwright.dynamic_lstm(x, h, c, weights, bias, layer.hidden_size)
            x = y.squeeze(1) if directions == 1 else y.transpose(1, 2).flatten(2)  # (T, D, B, H) -> (T, B, D · H)
            ends.append(tuple(end))
        if len(ends) == 1:
            return x, ends[0]
        return x, (torch.cat([h for h, _ in ends]), torch.cat([c for _, c in ends]))

    def extra_repr(self) -> str:
        return self._layer[0].extra_repr()


def gates_in_order(rows: Tensor) -> Tensor:
    """Rows of the gates i, f, g, o in the order of ONNX: i, o, f, g."""
    i, f, g, o = rows.chunk(4)
    return torch.cat([i, o, f, g])


def _biases(layer: DynamicLSTM, places: range) -> Tensor:
    """The biases of inputs and states, (directions, 8 · hidden)."""
    rows = [torch.cat([gates_in_order(b.detach()) for b in layer.floats_of(place)[2:4]]) for place in places]
    return torch.stack(rows)
