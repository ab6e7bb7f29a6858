"""Float recurrent layers as one operator while a model is exported, so that the length of sequences stays free.

Torch finds the shape of their results by computing one step after the other, which makes the example's length a
constant of all that follows. The file would take other lengths, and compute wrong shapes or values.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitwright.numerics.kernel_operator import LIBRARY

_KINDS: dict[Callable[..., Any], str] = {getattr(torch, kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
LIBRARY.define(
    "recurrent(str kind, Tensor x, Tensor[] states, Tensor[] weights, bool biases, int layers, bool bidirectional, "
    "bool batch_first) -> Tensor[]"
)


@torch.library.register_fake("bitwright::recurrent", lib=LIBRARY)
def _(
    kind: str,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    rows = x.new_empty(*x.shape[:2], states[0].shape[-1] * (1 + bidirectional))
    return [rows, *(torch.empty_like(state) for state in states)]


class WholeRecurrentLayers(TorchFunctionMode):
    """While it lasts, recurrent layers are one operator of Bitwright's; packed sequences stay as they are."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls of torch's recurrent functions."""
        kind = _KINDS.get(func)
        if kind is None or len(args) != 9 or not isinstance(args[3], bool):  # packed ones have their batch sizes second
            return func(*args, **(kwargs or {}))
        x, given, weights, biases, layers, _, _, bidirectional, batch_first = args
        states = list(given) if kind == "lstm" else [given]
        return tuple(
            torch.ops.bitwright.recurrent(kind, x, states, list(weights), biases, layers, bidirectional, batch_first)
        )
