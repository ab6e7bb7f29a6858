"""Find inputs that a model accepts, for toolkits that need none, from what its first layers read."""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from bitwright.graph import Inputs
from bitwright.modes import random_numbers_kept
from bitwright.nn.operators import operator_of_module

_log = logging.getLogger(__name__)
_LAYERS = 4  # number of first layers to look at
_SIZES = {
    1: [(64,), (1024,), (16000,)],
    2: [(s, s) for s in (32, 64, 224, 28, 128, 256, 16, 8, 299, 384, 512)],
    3: [(8, 16, 16), (16, 32, 32), (16, 112, 112)],
}


def find_inputs(model: nn.Module) -> Inputs | None:
    """Inputs that ``model`` computes with, or None if none were found; the model itself is not run."""
    twin: Any = copy.deepcopy(model).eval()
    with random_numbers_kept(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for inputs in _candidates(twin):
            tried = copy.deepcopy(inputs)
            try:
                twin(*tried.args, **tried.kwargs)
            except Exception as error:
                _log.debug("the model does not take inputs %s: %s", inputs, error)
            else:
                return Inputs(tuple(x.asked if isinstance(x, _Items) else x for x in inputs.args), inputs.kwargs)
    return None


class _Items(dict[Any, Any]):
    """A dict with a tensor under any requested key; its copies report the keys to it."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value
        self.asked: dict[Any, torch.Tensor] = {}

    def __deepcopy__(self, memo: object) -> "_Items":
        made = _Items(self.value)
        made.asked = self.asked
        return made

    def __missing__(self, key: object) -> torch.Tensor:
        self.asked[key] = self.value
        self[key] = self.value.clone()
        return self[key]


def _candidates(model: nn.Module) -> Iterator[Inputs]:
    told = getattr(model, "dummy_inputs", None)  # as in the models of transformers
    if isinstance(told, dict):
        yield Inputs.of(told)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) != 1:
        return
    for kind in (lambda x: x, _Items):
        yield from (Inputs((kind(x),)) for x in _first_tensors(model))


def _first_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Inputs for the first layers of a model, in likely sizes."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    for layer in islice(_layers(model), _LAYERS):
        yield from (x.to(like.device) for x in _inputs_of(layer, like.dtype))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have Parameters and no modules inside."""
    for module in model.modules():
        if not any(module.children()) and next(module.parameters(), None) is not None:
            yield module


def _inputs_of(layer: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs that a layer accepts, in likely sizes."""
    operator = operator_of_module(layer)
    if isinstance(layer, nn.Embedding):
        yield torch.arange(16).reshape(2, 8) % layer.num_embeddings
    elif isinstance(layer, nn.Linear):
        yield from (torch.randn(*shape, layer.in_features, dtype=dtype) for shape in ((2,), (2, 8)))
    elif isinstance(layer, nn.RNNBase):
        yield torch.randn(4, 4, layer.input_size, dtype=dtype)
    elif operator is not None and operator.rank in _SIZES:
        channels = getattr(layer, "in_channels", None) or getattr(layer, "num_features", 0)
        yield from (torch.randn(2, channels, *size, dtype=dtype) for size in _SIZES[operator.rank] if channels)
