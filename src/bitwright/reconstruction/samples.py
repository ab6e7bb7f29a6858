"""Samples: the inputs of a unit, quantized and float, and its targets; drawn at random or batch by batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwright.reconstruction.columns import Column
from bitwright.reconstruction.rest import Rest

Call = Callable[..., Sequence[Any]]


class Sample(NamedTuple):
    """Values of the quantized model's and the float model's inputs of a unit, and the float results.

    If predictions count, also the other inputs of the rest of the model, and its float results.
    """

    quantized: list[Any]
    exact: list[Any]
    targets: list[Any]
    others: list[Any]
    predictions: list[Any]


class Samples:
    """All samples of a unit.

    ``call`` is the unit in float, to find out whether it treats samples separately; ``rest`` is the rest of the model,
    where predictions count.
    """

    def __init__(
        self,
        quantized: list[Column],
        exact: list[Column],
        targets: list[Column],
        call: Call,
        rest: Rest | None = None,
    ) -> None:
        more = ([], []) if rest is None else (rest.others, rest.predictions)
        self.columns = Sample(quantized, exact, targets, *more)
        self.rest = rest
        self.batches = len(targets[0].values)
        self.sizes = targets[0].sizes
        self.separable = self._separable(call)

    def batch(self, number: int) -> Sample:
        """One batch as given."""
        return Sample(*([column.batch(number) for column in columns] for columns in self.columns))

    def __iter__(self) -> Iterator[Sample]:
        return (self.batch(number) for number in range(self.batches))

    def draw(self, size: int, source: torch.Generator, *, exact: bool = True) -> Sample:
        """Samples drawn at random, or one batch if samples are inseparable; float inputs only on request."""
        if not self.separable:
            return self.batch(int(torch.randint(self.batches, (), generator=source)))
        chosen = torch.randperm(sum(self.sizes), generator=source)[:size]
        columns = self.columns if exact else self.columns._replace(exact=[])
        return Sample(*([column.rows(chosen) for column in each] for each in columns))

    def _separable(self, call: Call) -> bool:
        """Whether some samples of a batch have the same results alone as within it."""
        if any(column.block is None for columns in self.columns for column in columns) or self.sizes[0] < 2:
            return False
        chosen = torch.arange(self.sizes[0])[1::2]
        try:
            results = call(*(column.rows(chosen) for column in self.columns.exact))
            pairs = list(zip(results, self.columns.targets, strict=True))
            if self.rest is not None:
                exact = [column.rows(chosen) for column in self.rest.exact_others]
                pairs += zip(self.rest(results, exact), self.columns.predictions, strict=True)
        except Exception:  # such as a reshape to the size of the batch
            return False
        return all(close(result, column.rows(chosen)) for result, column in pairs)


def close(found: object, wanted: Tensor) -> bool:
    """Whether two results are equal up to the last digits."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    near = 1e-3 * wanted.abs().max().item() if wanted.numel() else 0.0
    return bool(torch.allclose(found, wanted, rtol=1e-3, atol=near))
