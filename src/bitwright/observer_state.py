"""The state of all observers of a model: kept in a checkpoint during calibration, and joined over ranks."""

import copy
import os
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from bitwright.checkpoints import Checkpoint, digest_of
from bitwright.distributed import Ranks
from bitwright.errors import SaveError
from bitwright.graph import Inputs
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.signals import DelayedSignals


def identity_of(model: nn.Module) -> dict[str, str]:
    """Identify what calibration depends on: the model's computation, its weights, and how its quantizers observe."""
    found = quantizers(model)
    inside = tuple(f"{name}." for name in found)
    weights = {n: t for n, t in model.state_dict().items() if not n.startswith(inside)}
    recipe = {
        n: (str(q.spec), q.observer_name, repr(q.observer._given[1]), q.enabled, q.fixed) for n, q in found.items()
    }
    code = str(getattr(model, "code", type(model).__qualname__))
    return {"model": digest_of([code, weights]), "recipe": digest_of(recipe)}


class ObservingProgress:
    """Keeps the state of observers in a checkpoint, and continues from there."""

    def __init__(
        self, folder: str | os.PathLike[str], job: str, model: nn.Module, seeing: Mapping[str, TensorQuantizer]
    ) -> None:
        self._seeing, self._signals = seeing, DelayedSignals()
        self._file = Checkpoint(folder, job, identity_of(model))
        state_of(seeing)  # an observer that does not define what it keeps is refused now, not after an hour
        self.done, self._digest, self._expected = 0, "", ""
        self._kept = 0  # batches that the observers have seen completely, or 0 in the middle of one
        saved = self._file.read()
        if saved is not None:
            with self._file.blamed():
                self.done, self._expected = int(saved.data["batches"]), str(saved.data["data"])
                load_state(seeing, saved.tensors)

    def has(self, inputs: Inputs, number: int) -> bool:
        """Whether batch ``number`` was seen before; raises if another batch was."""
        self._digest = digest_of([self._digest, inputs.args, inputs.kwargs])
        if number == self.done and self._digest != self._expected:
            raise SaveError(
                f"the checkpoint {str(self._file.path)!r} is of other data, or of the same in another order: its "
                f"{number} batches are not the first {number} of these; remove it to start over"
            )
        self._kept = 0
        if number <= self.done:
            self._signals.deliver()
        return number <= self.done

    def keep(self, number: int, *, last: bool = False) -> None:
        """After a batch, or all of them, write what was seen if it is time to; then let signals take effect."""
        if number < self.done:
            raise SaveError(
                f"the checkpoint {str(self._file.path)!r} has {self.done} batches, but the data only {number}; remove "
                "it to start over"
            )
        self._kept = number
        if last or self._signals.noted is not None or self._file.due:
            self._write()
            self._signals.deliver()

    def _write(self) -> None:
        self._file.write(state_of(self._seeing), {"batches": self._kept, "data": self._digest})

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:  # noqa: ANN401
        if self._kept and kind is not None and issubclass(kind, Exception) and not isinstance(error, SaveError):
            self._write()  # the data failed, between two batches
        self._signals.__exit__(kind, error, trace)


def state_of(seeing: Mapping[str, TensorQuantizer]) -> dict[str, Tensor]:
    """The state of the observers of quantizers, by name."""
    return {f"{name}:{key}": t for name, q in seeing.items() for key, t in q.observer.state_tensors().items()}


def load_state(seeing: Mapping[str, TensorQuantizer], state: Mapping[str, Tensor]) -> None:
    """Restore observers from the result of :func:`state_of`."""
    for name, quantizer in seeing.items():
        start = f"{name}:"
        mine = {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}
        quantizer.observer.load_state_tensors(mine)


def join(ranks: Ranks, model: nn.Module, seeing: Mapping[str, TensorQuantizer], batches: int, *, uneven: bool) -> None:
    """Merge the observers of all ranks, in rank order, on every rank."""
    if ranks.alone:
        return
    for what, digest in identity_of(model).items():
        ranks.agree(f"the {what}", digest)
    if not uneven:
        ranks.agree("the number of batches", str(batches), "give each rank the same number, or pass uneven=True")
    merge_over_ranks(ranks, seeing)


def merge_over_ranks(ranks: Ranks, seeing: Mapping[str, TensorQuantizer]) -> None:
    """Like :func:`join`, for models known to be the same."""
    if ranks.alone:
        return
    first, *others = ranks.gather_tensors(state_of(seeing))
    twins = copy.deepcopy(dict(seeing))
    load_state(seeing, first)
    for state in others:
        load_state(twins, state)
        for name, quantizer in seeing.items():
            quantizer.observer.merge(twins[name].observer)
