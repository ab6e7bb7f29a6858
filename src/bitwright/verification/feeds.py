"""Feeds: a model's inputs as the arrays that a file expects."""

import numpy as np
import torch
from torch import nn

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


def as_array(value: object) -> np.ndarray:
    """A tensor, number or array as an array."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype is torch.bfloat16:
        raise VerifyError("a runtime here takes no inputs in bfloat16: give them in float32 or float16")
    return value.detach().cpu().numpy()
