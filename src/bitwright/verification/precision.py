"""Compare a file with a model in half precision: the file with the float32 twin, and the twin with the model."""

import torch
from torch import Tensor, nn

from bitwright.exporting.precision import in_float32, inputs_in, precision_of
from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.preparation import ledger_of
from bitwright.verification.outputs import difference, magnitude, simulate, tensors_in


def in_files_precision(model: nn.Module, data: list[Inputs]) -> tuple[nn.Module, list[Inputs], list[str]]:
    """The model and the data in float32, as files compute, and by how much that changes results, if it does."""
    kind = precision_of(model)
    if kind is torch.float32:
        return model, data, []
    twin, single = in_float32(model), [inputs_in(inputs) for inputs in data]
    taken = next((t.dtype for t in tensors_in(ledger_of(model).example) if t.is_floating_point()), kind)
    with eval_mode(model), eval_mode(twin):
        pairs = [
            (simulate(twin, a), simulate(model, _as_taken(b, taken, kind))) for a, b in zip(single, data, strict=True)
        ]
    worst = max(
        (_apart(*both) for one, other in pairs for both in zip(tensors_in(one), tensors_in(other), strict=True))
    )
    name = str(kind).removeprefix("torch.")
    note = (
        f"the model computes in {name} and the file in float32: it was compared with the model in float32, from which "
        f"the model in {name} differs by up to {100 * worst:.2g}% of an output's magnitude on this data"
    )
    return twin, single, [note]


def _as_taken(inputs: Inputs, taken: torch.dtype, kind: torch.dtype) -> Inputs:
    """A batch as the model takes it: as it is in the model's precision, or else as the example was."""
    given = next((t.dtype for t in tensors_in(inputs) if t.is_floating_point()), kind)
    return inputs if given is kind else inputs_in(inputs, taken)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two results, as a share of the magnitude; infinite if their shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(difference(ours, theirs).max()) / (magnitude(ours) or 1.0) if ours.numel() else 0.0
