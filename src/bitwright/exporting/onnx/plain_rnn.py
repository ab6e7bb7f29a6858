"""Float recurrent layers as ONNX's operators.

Of ``nn.RNN``, torch's exporter writes one copy of the cell for each step of the example instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm

import bitwright.exporting.plain_recurrent  # noqa: F401  (defines the operator)


def rnn_translations(op: Any) -> dict[Callable[..., Any], Callable[..., Any]]:
    """A part of the table that ``torch.onnx.export`` takes."""

    def recurrent(
        kind: str,
        x: Any,
        states: Sequence[Any],
        weights: Sequence[Any],
        biases: bool,
        layers: int,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        settings = (biases, layers, 0.0, False, bidirectional, batch_first)
        if kind == "lstm":
            return aten_lstm(x, states, weights, *settings)
        if kind == "gru":
            return aten_gru(x, states[0], weights, *settings)
        own = {"weights": weights, "each": 4 if biases else 2, "directions": 1 + bidirectional}
        return _rnn(op, x, states[0], batch_first, activation=kind.removeprefix("rnn_").capitalize(), **own)

    return {torch.ops.bitwright.recurrent.default: recurrent}


def _rnn(
    op: Any,
    x: Any,
    hidden: Any,
    batch_first: bool,
    *,
    weights: Sequence[Any],
    each: int,
    directions: int,
    activation: str,
) -> tuple[Any, Any]:
    step, last = each * directions, []
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x  # (length, samples, features)
    for layer in range(len(weights) // step):
        own = weights[step * layer : step * (layer + 1)]
        first = _slice(op, hidden, directions * layer, directions * (layer + 1))
        x, state = _layer(op, x, first, [own[at : at + each] for at in range(0, step, each)], activation)
        last.append(state)
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return x, op.Concat(*last, axis=0) if len(last) > 1 else last[0]


def _layer(op: Any, x: Any, first: Any, weights: list[Sequence[Any]], activation: str) -> tuple[Any, Any]:
    """The results of all steps, (length, samples, directions · hidden), and the last states."""
    stacked = [_stacked(op, parts) for parts in zip(*weights, strict=True)]
    bias = op.Concat(*stacked[2:], axis=1) if len(stacked) > 2 else None
    count = len(weights)
    results, last = op.RNN(
        *(x, stacked[0], stacked[1], bias, None, first),
        hidden_size=weights[0][1].shape[1],
        direction="bidirectional" if count > 1 else "forward",
        activations=[activation] * count,
    )
    rows = op.Transpose(results, perm=[0, 2, 1, 3])  # (length, samples, directions, hidden)
    return op.Reshape(rows, op.Constant(value_ints=[0, 0, -1])), last


def _stacked(op: Any, parts: Sequence[Any]) -> Any:
    """The weights of all directions, one after the other along a first axis."""
    raised = [op.Unsqueeze(part, op.Constant(value_ints=[0])) for part in parts]
    return op.Concat(*raised, axis=0) if len(raised) > 1 else raised[0]


def _slice(op: Any, x: Any, start: int, end: int) -> Any:
    bounds = (op.Constant(value_ints=[at]) for at in (start, end, 0))
    return op.Slice(x, *bounds)
