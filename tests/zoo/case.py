"""A net of the zoo, with its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """How to build a net, and its inputs for a batch size and a size (height and width, or length)."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]
    size: int
    other: int | None  # another size that the captured net has to take, or None

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


ZOO: dict[str, Case] = {}


def images(batch: int, size: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, size, size),)


def member(inputs: Callable[[int, int], Any] = images, size: int = 32, other: int | None = 48):
    """File a net under its class's name."""

    def decorate(build: Callable[[], nn.Module]) -> Any:
        ZOO[build.__name__] = Case(build, inputs, size, other)
        return build

    return decorate
