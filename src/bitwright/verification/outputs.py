"""Compare a file's outputs with the simulation's: all there, in order, of one shape and type, finite, and close."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.graph import Inputs
from bitwright.numerics import dequantize
from bitwright.quantizer import TensorQuantizer
from bitwright.verification.proof import OutputCheck
from bitwright.verification.tensors import rounding_by

FLOAT_TOLERANCE = 1e-4
"""A share of an output's magnitude: what float32 in another order of summing may make of it."""
_DRAWS = 4  # of noise


class OutputTally:
    """Adds up differences of the outputs over batches.

    Args:
        names: the file's outputs, in order.
        weight_sites: the names of quantizers whose tensors are stored.
    """

    def __init__(self, names: Sequence[str], weight_sites: set[str]) -> None:
        self._sums = {name: _Sums() for name in names}
        self._weight_sites = weight_sites

    def add(
        self,
        model: nn.Module,
        inputs: Inputs,
        given: Mapping[str, np.ndarray],
        following: list[Tensor] | None,
    ) -> None:
        """Compare the outputs on one batch.

        Args:
            model: the simulation.
            inputs: the batch.
            given: the runtime's outputs by name.
            following: what the simulation made of the runtime's own quantized tensors, if that is known.
        """
        free = simulate(model, inputs)
        names = [*self._sums, *(f"number {i + 1}" for i in range(len(self._sums), len(free)))]
        doubtful = False
        for i, name in enumerate(names):
            sums = self._sums.setdefault(name, _Sums())
            ours = free[i] if i < len(free) else None
            sums.problem = sums.problem or _problem(ours, given.get(name), len(free))
            if sums.problem or ours is None:
                continue
            theirs = torch.from_numpy(np.array(given[name]))
            sums.add(ours, theirs, None if following is None else following[i])
            doubtful |= sums.doubtful
        if doubtful:
            self._measure_noise(model, inputs, free)

    def checks(self) -> list[OutputCheck]:
        """The differences found."""
        return [sums.check(name) for name, sums in self._sums.items()]

    def _measure_noise(self, model: nn.Module, inputs: Inputs, free: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)

        def rounding(name: str, call: int, quantizer: TensorQuantizer, x: Tensor) -> Tensor | None:
            return None if name in self._weight_sites else _one_step_off(quantizer, x, generator)

        for _ in range(_DRAWS):
            with rounding_by(model, rounding):
                noisy = simulate(model, inputs)
            for sums, ours, other in zip(self._sums.values(), free, noisy, strict=False):
                if ours.shape == other.shape:
                    sums.noise = max(sums.noise, _largest(difference(ours, other)))


@dataclasses.dataclass
class _Sums:
    """What is known of one output so far."""

    problem: str = ""
    largest: float = 0.0
    total: float = 0.0
    count: int = 0
    reach: float = 0.0
    noise: float = 0.0
    local: float | None = 0.0

    @property
    def doubtful(self) -> bool:
        """Whether it differs by more than float arithmetic explains."""
        return self.largest > FLOAT_TOLERANCE * self.reach

    def add(self, ours: Tensor, theirs: Tensor, following: Tensor | None) -> None:
        gap = difference(ours, theirs)
        self.largest = max(self.largest, _largest(gap))
        self.total += float(gap.sum())
        self.count += gap.numel()
        self.reach = max(self.reach, _magnitude(ours))
        if following is None or following.shape != theirs.shape:
            self.local = None
        elif self.local is not None:
            self.local = max(self.local, _largest(difference(following, theirs)))

    def check(self, name: str) -> OutputCheck:
        if self.problem or not self.count:
            return OutputCheck(name, problem=self.problem or "has no values")
        return OutputCheck(
            name,
            largest=self.largest,
            mean=self.total / self.count,
            relative=_ratio(self.largest, self.reach),
            steps=_ratio(self.largest, self.noise) if self.doubtful else 0.0,
            local=None if self.local is None else _ratio(self.local, self.reach),
        )


def _ratio(value: float, unit: float) -> float:
    if value == 0.0:
        return 0.0
    return value / unit if unit else float("inf")


def _largest(gap: Tensor) -> float:
    return float(gap.max()) if gap.numel() else 0.0


def _magnitude(x: Tensor) -> float:
    if not x.is_floating_point():
        return 1.0
    finite = x.detach().double().cpu().abs()
    return _largest(finite[torch.isfinite(finite)])


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far values are apart: NaN and NaN not at all, nor equal infinities; NaN and any other, infinitely.

    Integers, such as classes and indices, and booleans are the same or one apart.
    """
    a, b = (t.detach().cpu() for t in (ours, theirs))
    if not (a.is_floating_point() and b.is_floating_point()):
        return (a != b).double()
    a, b = a.double(), b.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    gap = torch.where(same, 0.0, (a - b).abs())
    return torch.where(torch.isnan(gap), torch.inf, gap)


def _problem(ours: Tensor | None, theirs: np.ndarray | None, count: int) -> str:
    if ours is None:
        return f"is one too many: the simulation has {count}"
    if theirs is None:
        return "is missing in the file"
    found = torch.from_numpy(np.array(theirs))
    if found.shape != ours.shape:
        return f"has the shape {list(found.shape)}, in the simulation {list(ours.shape)}"
    if found.is_floating_point() != ours.is_floating_point():
        return f"has the type {found.dtype}, in the simulation {ours.dtype}"
    return ""


def _one_step_off(quantizer: TensorQuantizer, x: Tensor, generator: torch.Generator) -> Tensor:
    """What a quantizer gives, with each value one step up, one step down, or as it is."""
    spec, method = quantizer.spec, quantizer.method
    away = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
    if spec.format.floating:
        return quantizer.method(x * (1 + away * torch.finfo(spec.format.storage).eps), *quantizer.qparams())
    integers = (quantizer.integers(x).to(torch.int32) + away).clamp_(spec.qmin, spec.qmax)
    return dequantize(integers, *quantizer.qparams(), method.axis, method.group).to(x.dtype)


def flatten(value: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors in a model's result, in the order in which the exporter lists them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in flatten(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in flatten(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in flatten(getattr(value, f.name))]
    return []


def simulate(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The simulation's outputs on one batch."""
    with torch.no_grad():
        return flatten(model(*inputs.args, **inputs.kwargs))
