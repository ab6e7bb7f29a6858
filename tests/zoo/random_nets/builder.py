"""A net of steps that were drawn at random, and what draws them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Step = tuple[str, Callable[..., Any], tuple[int, ...]]
T = TypeVar("T")
LARGEST = 40_000


class RandomNet(nn.Module):
    """Runs its steps one after the other; each reads values made before it."""

    def __init__(self, layers: dict[str, nn.Module], steps: list[Step], outputs: list[int]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.steps, self.outputs = steps, outputs

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for _, step, reads in self.steps:
            values.append(step(self, *(values[i] for i in reads)))
        results = tuple(values[i] for i in self.outputs)
        return results if len(results) > 1 else results[0]

    def extra_repr(self) -> str:
        lines = [
            f"v{i + 1} = {text}({', '.join(f'v{r}' for r in reads)})" for i, (text, _, reads) in enumerate(self.steps)
        ]
        return "\n".join([*lines, f"return {', '.join(f'v{i}' for i in self.outputs)}"])


@dataclass
class Builder:
    """Draws one net.

    Attributes:
        rng: what everything is drawn with.
        rank: how many spatial dimensions its images have.
        layers: the layers so far.
        steps: the steps so far.
        values: what they give for the example; the first is the input.
    """

    rng: random.Random
    rank: int = 2
    layers: dict[str, nn.Module] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def layer(self, module: nn.Module) -> str:
        name = f"layer{len(self.layers)}"
        self.layers[name] = module
        return name

    def parameter(self, *shape: int) -> str:
        holder = nn.Module()
        holder.value = nn.Parameter(torch.randn(*shape) * 0.3)
        return self.layer(holder)

    def add(self, text: str, step: Callable[..., Any], *reads: int) -> int:
        """Add a step if it runs, and gives one tensor that is neither empty nor too large, and seldom only zeros."""
        net = RandomNet(self.layers, [], [0]).eval()
        with torch.no_grad():
            value = step(net, *(self.values[i] for i in reads))
        if not 0 < value.numel() <= LARGEST or not float(value.abs().max()) < 1e4:
            raise ValueError("not a useful step")
        if float(value.abs().max()) < 1e-3 and (value.any() or not self.flip(0.3)):
            raise ValueError("nearly nothing")
        self.steps.append((text, step, reads))
        self.values.append(value)
        return len(self.values) - 1

    def call(self, module: nn.Module, *reads: int) -> int:
        name = self.layer(module)
        return self.add(f"{module!r}", lambda net, *xs, n=name: getattr(net, n)(*xs), *reads)

    def images(self) -> list[int]:
        return [i for i, v in enumerate(self.values) if v.ndim == self.rank + 2]

    def image(self) -> int:
        return self.pick(self.images())

    def any(self) -> int:
        return self.pick(list(range(len(self.values))))

    def pick(self, among: list[int]) -> int:
        """A value, most often a late one."""
        if not among:
            raise ValueError("nothing to read")
        return among[-1] if self.rng.random() < 0.7 else self.rng.choice(among)

    def one_of(self, *choices: T) -> T:
        return self.rng.choice(choices)

    def flip(self, likely: float = 0.5) -> bool:
        return self.rng.random() < likely

    def each(self, *choices: int) -> int | tuple[int, ...]:
        """One number for all spatial dimensions, or one for each."""
        return self.one_of(*choices) if self.flip(0.7) else tuple(self.one_of(*choices) for _ in range(self.rank))

    def of_rank(self, *modules: T) -> T:
        """The one of three that is for this rank."""
        return modules[self.rank - 1]


def divisors(number: int, *wanted: int) -> Sequence[int]:
    return [w for w in wanted if w and number % w == 0]
