"""Family: one public architecture, how to build it, and what to feed it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture of the zoo.

    Attributes:
        name: unique, and fit for a file name.
        library: where it comes from.
        kind: cnn, vision transformer, text encoder, decoder …
        build: makes the model with random weights.
        inputs: makes a batch of so many samples, from torch's global random state.
    """

    name: str
    library: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]


def configured(cls: str, settings: Mapping[str, Any]) -> nn.Module:
    """Make a model of transformers from settings of its configuration."""
    import transformers

    model = getattr(transformers, cls)
    return model(model.config_class(**settings))


def image(batch: int, size: int) -> Tensor:
    """Draw images like normalised photos, with structure at every scale: (batch, 3, size, size)."""
    result = 0.5 * torch.randn(batch, 3, size, size)
    for cells in (1, 4, 16):
        result += F.interpolate(torch.randn(batch, 3, cells, cells), size=(size, size), mode="bilinear")
    return result / 1.5


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Draw token ids, none of them among the first few special ones: (batch, length)."""
    return torch.randint(5, vocabulary, (batch, length))


def padding(batch: int, length: int) -> Tensor:
    """Make an attention mask of texts that all end in some padding: (batch, length)."""
    ends = torch.randint(length // 2, length, (batch, 1))
    return (torch.arange(length) < ends).long()


def sound(batch: int, samples: int) -> Tensor:
    """Draw waveforms, a few tones in noise: (batch, samples)."""
    time = torch.arange(samples) / 16000
    tones = torch.sin(2 * torch.pi * time * torch.empty(batch, 3, 1).uniform_(80, 2000)).sum(1)
    return 0.3 * tones + 0.1 * torch.randn(batch, samples)
