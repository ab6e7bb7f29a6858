"""Feeds: a model's inputs as the arrays that a file takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs


def feeds_of(model: nn.Module, file: LoadedFile, inputs: Inputs) -> dict[str, np.ndarray]:
    """The inputs of one call of the model, by the names of the file's inputs."""
    named = flat_inputs(model, inputs)
    wanted = file.record.inputs if file.record is not None else ()
    if len(wanted) != len(file.inputs) or any(n not in named for n in wanted):
        raise VerifyError(f"the file takes {list(wanted)} as {file.inputs}, but the batch has {list(named)}")
    return {name: as_array(named[argument]) for name, argument in zip(file.inputs, wanted, strict=True)}


def first_sample(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The first sample of a batch."""
    return {name: value[:1] if value.ndim else value for name, value in feeds.items()}


def as_array(value: Any) -> np.ndarray:  # noqa: ANN401
    """A tensor, number or array as an array."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
