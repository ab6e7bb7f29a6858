"""Compare a file's outputs with the simulation's: all there, in order, with equal shape and type, finite, and close."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.errors import VerifyError, useful_line
from bitwright.graph import Inputs
from bitwright.numerics import dequantize
from bitwright.numerics.ranges import scale_and_zero_point
from bitwright.quantizer import TensorQuantizer
from bitwright.verification.proof import OutputCheck
from bitwright.verification.tensors import rounding_by

FLOAT_TOLERANCE = 1e-4
"""A share of an output's magnitude: what float32 in another order of summing may make of it."""
_DRAWS = 4  # of noise
_MANY = 16  # values that a channel needs to have its own magnitude
_LEAST = 0.01  # of the whole output's magnitude, which float arithmetic elsewhere in it may leave in a channel


class OutputTally:
    """Adds up differences of the outputs over batches; ``weight_sites`` are quantizers whose tensors are stored."""

    def __init__(self, names: Sequence[str], weight_sites: set[str]) -> None:
        self._checks = {name: OutputCheck(name) for name in names}
        self._counts = dict.fromkeys(names, 0)
        self._weight_sites = weight_sites

    def add(self, model: nn.Module, inputs: Inputs, given: Mapping[str, np.ndarray], following: object) -> None:
        """Compare the outputs on one batch.

        ``following`` are the simulation's results from the runtime's own quantized tensors; None if unknown.
        """
        free = tensors_in(simulate(model, inputs))
        followed = [] if following is None else tensors_in(following)
        doubtful: dict[int, float] = {}
        extra = [f"number {i + 1}" for i in range(len(self._counts), len(free))]
        for i, (name, ours) in enumerate(itertools.zip_longest([*self._counts, *extra], free)):
            check = self._checks.setdefault(name, OutputCheck(name))
            check.problem = check.problem or _problem(ours, given.get(name), len(free))
            if check.problem or ours is None or not ours.numel():
                continue
            largest = self._add(check, ours, as_tensor(given[name]), followed[i] if i < len(followed) else None)
            if largest > FLOAT_TOLERANCE * magnitude(ours):
                doubtful[i] = largest
        if doubtful:
            checks, noise = list(self._checks.values()), self._noise(model, inputs, free)
            for i, largest in doubtful.items():
                checks[i].steps = max(checks[i].steps or 0.0, ratio(largest, noise[i]))

    def _add(self, check: OutputCheck, ours: Tensor, theirs: Tensor, following: Tensor | None) -> float:
        gap = difference(ours, theirs)
        largest, before = float(gap.max()), self._counts[check.name]
        same = following is not None and following.shape == theirs.shape
        # While it is watched, a runtime may round a value on a border otherwise than it does for users.
        local = min(_share(difference(following, theirs), ours), _share(gap, ours)) if same else None  # pyrefly: ignore
        count = self._counts[check.name] = before + gap.numel()
        check.mean = ((check.mean or 0.0) * before + float(gap.sum())) / count
        check.largest = max(check.largest or 0.0, largest)
        check.relative = max(check.relative or 0.0, ratio(largest, magnitude(ours)))
        check.steps = check.steps or 0.0
        if not before:
            check.local = local
        elif check.local is not None:
            check.local = None if local is None else max(check.local, local)
        return largest

    def checks(self) -> list[OutputCheck]:
        """The differences found."""
        for name, count in self._counts.items():
            if not count and not self._checks[name].problem:
                self._checks[name].problem = "has no values"
        return list(self._checks.values())

    def _noise(self, model: nn.Module, inputs: Inputs, free: list[Tensor]) -> list[float]:
        """How far one step of noise at every quantizer moves each output, where it stays finite."""
        generator = torch.Generator().manual_seed(0)
        largest = [0.0] * len(free)

        def rounding(name: str, call: int, quantizer: TensorQuantizer, x: Tensor, _: Tensor) -> Tensor | None:
            return None if name in self._weight_sites else _one_step_off(quantizer, x, generator)

        for _ in range(_DRAWS):
            with rounding_by(model, rounding):
                noisy = tensors_in(simulate(model, inputs))
            for i, (ours, other) in enumerate(zip(free, noisy, strict=False)):
                if ours.shape == other.shape:
                    largest[i] = max(largest[i], _max(difference(ours, other)))
        return largest


def _max(values: Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.max()) if finite.numel() else 0.0


def magnitude(x: Tensor) -> float:
    """The largest finite magnitude; 1 for integers and booleans."""
    return _max(x.detach().double().cpu().abs()) if x.is_floating_point() else 1.0


def ratio(value: float, unit: float) -> float:
    """A value in units of another; infinite units of zero, unless the value is zero, too."""
    if value == 0.0:
        return 0.0
    return value / unit if unit else float("inf")


def _share(gap: Tensor, ours: Tensor) -> float:
    """The largest difference as a share of the magnitude: of the whole, and of every channel along any axis.

    A channel of probabilities beside one of pixels must not hide behind the pixels' magnitude.
    """
    whole = magnitude(ours)
    worst = ratio(float(gap.max()), whole)
    if not ours.is_floating_point():
        return worst
    sizes = ours.detach().double().cpu().abs()
    sizes[~torch.isfinite(sizes)] = 0.0
    for axis in range(ours.ndim):
        others = [d for d in range(ours.ndim) if d != axis]
        if others and ours.numel() >= _MANY * ours.shape[axis]:
            units = sizes.amax(others) + _LEAST * whole
            gaps = gap.amax(others)
            worst = max(worst, *(ratio(g, u) for g, u in zip(gaps.tolist(), units.tolist(), strict=True)))
    return worst


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far apart values are: 0 for two NaNs or equal infinities, infinitely for NaN and anything else.

    Integers, such as classes and indices, and booleans are 0 or 1 apart.
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
    found = as_tensor(theirs)
    if found.shape != ours.shape:
        return f"has the shape {list(found.shape)}, in the simulation {list(ours.shape)}"
    if found.dtype != ours.dtype:
        return f"has the type {found.dtype}, in the simulation {ours.dtype}"
    return ""


def as_tensor(value: np.ndarray) -> Tensor:
    """An array as a tensor of the same type."""
    if value.dtype.name == "bfloat16":  # numpy has no such type of its own
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(value))
    except TypeError as error:
        raise VerifyError(f"torch has no type for the {value.dtype} that the runtime returned") from error


def _one_step_off(quantizer: TensorQuantizer, x: Tensor, generator: torch.Generator) -> Tensor:
    """A quantizer's result, with each value moved one step up, one step down, or not at all."""
    spec, method = quantizer.spec, quantizer.method
    away = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
    if spec.format.floating:
        return quantizer.method(x * (1 + away * torch.finfo(spec.format.storage).eps), *quantizer.qparams())
    integers = (quantizer.integers(x).to(torch.int32) + away).clamp_(spec.qmin, spec.qmax)
    own = not quantizer.calibrated  # a dynamic one: each tensor has its own range
    scales = scale_and_zero_point(x.amin(), x.amax(), spec) if own else quantizer.qparams()
    return dequantize(integers, *scales, method.axis, method.group).to(x.dtype)


def leaves(value: object) -> Iterator[Any]:
    """The parts of a model's result, in the exporter's order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif not isinstance(value, Tensor | nn.Module) and not callable(value):
        value = list(vars(value).values()) if getattr(value, "__dict__", None) else value  # a cache of keys and values
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(result: object) -> list[Tensor]:
    """The tensors of a model's result."""
    return [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]


def simulate(model: nn.Module, inputs: Inputs) -> Any:  # noqa: ANN401
    """The simulation's result on one batch, of which it gets a copy: models may write into their inputs."""
    try:
        with torch.no_grad():
            return inputs.run(model)
    except Exception as error:
        raise VerifyError(f"the model refuses the batch {inputs}: {useful_line(error)}") from error
