"""How a recurrent layer runs step by step, either way, over sequences that end at their own times."""

from collections.abc import Callable

import torch
from torch import Tensor

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State], State]


def run(cell: Cell, data: Tensor, sizes: list[int], start: State, *, reverse: bool) -> tuple[Tensor, State]:
    """Run a cell over steps of shrinking batch size, longest sequences first.

    Args:
        cell: from an input (b, features) and a state of tensors (b, …) to the next state, the first being the output.
        data: all steps one after the other, (sum of sizes, features).
        sizes: how many sequences are still going at each step.
        start: the state of all sequences, (B, …) each.
        reverse: whether to run from each sequence's last step to its first.

    Returns:
        The outputs, laid out as ``data``, and the last state of each sequence.
    """
    steps = list(torch.split(data, sizes))
    outputs: list[Tensor] = [data] * len(steps)
    state = tuple(s[: sizes[-1] if reverse else sizes[0]] for s in start)
    ended: list[State] = []
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        going = sizes[t]
        if going > state[0].shape[0]:  # backwards, shorter sequences join in
            state = tuple(torch.cat([s, new[s.shape[0] : going]]) for s, new in zip(state, start, strict=True))
        elif going < state[0].shape[0]:  # forwards, they leave
            ended.append(tuple(s[going:] for s in state))
            state = tuple(s[:going] for s in state)
        state = cell(steps[t], state)
        outputs[t] = state[0]
    last = tuple(torch.cat([s, *(e[i] for e in reversed(ended))]) for i, s in enumerate(state)) if ended else state
    return torch.cat(outputs), last
