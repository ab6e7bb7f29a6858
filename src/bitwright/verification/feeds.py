"""Feeds: a model's inputs as the arrays that a file expects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs


def feeds_of(model: nn.Module, file: LoadedFile, inputs: Inputs) -> dict[str, np.ndarray]:
    """The inputs of one call of the model, by the names of the file's inputs."""
    wanted = file.record.inputs if file.record is not None else ()
    try:
        named = flat_inputs(model, inputs)
    except TypeError:  # it is not a call of the model
        named = {}
    if len(wanted) != len(file.inputs) or any(n not in named for n in wanted):
        taken = ", ".join(wanted or file.inputs) or "no input"
        raise VerifyError(f"the file takes {taken}, and the batch is {inputs}")
    return {name: as_array(named[argument]) for name, argument in zip(file.inputs, wanted, strict=True)}


def doubled(model: nn.Module, file: LoadedFile, data: Sequence[Inputs]) -> list[Inputs]:
    """The first batch twice, the second time in reverse, if the file takes that, and no batch of another size is given.

    Some mistakes of runtimes show only where there are more samples. A model that refuses the size is not asked again.
    """
    try:
        given = [_batched(model, file, inputs) for inputs in data]
    except TypeError:  # one of them is no call of the model
        return []
    chosen = {id(tensor) for tensor in given[0]}
    if len({tensor.shape[0] for tensors in given for tensor in tensors}) != 1:
        return []

    def twice(x: Any) -> Any:  # noqa: ANN401
        return torch.cat([x, x.flip(0)]) if id(x) in chosen else x

    args, kwargs = fx.node.map_aggregate((data[0].args, data[0].kwargs), twice)  # pyrefly: ignore
    made = Inputs(tuple(args), dict(kwargs))
    try:
        with torch.no_grad():
            made.run(model)
    except Exception:  # whatever the model or its guards say
        return []
    return [made]


def _batched(model: nn.Module, file: LoadedFile, inputs: Inputs) -> list[torch.Tensor]:
    """The tensors of a call whose first size the file leaves free."""
    free, named = set(file.batched()), flat_inputs(model, inputs)
    wanted = file.record.inputs if file.record is not None else ()
    return [named[own] for name, own in zip(file.inputs, wanted, strict=False) if name in free and own in named]


def as_array(value: object) -> np.ndarray:
    """A tensor, number or array as an array."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype is torch.bfloat16:
        raise VerifyError("a runtime here takes no inputs in bfloat16: give them in float32 or float16")
    return value.detach().cpu().numpy()
