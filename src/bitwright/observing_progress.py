"""The progress of calibration: what the observers have seen, how many batches, and which."""

import os
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from bitwright.checkpoints import Checkpoint, DelayedSignals, digest_of
from bitwright.errors import SaveError
from bitwright.graph import Inputs
from bitwright.quantizer import TensorQuantizer, quantizers


def identity_of(model: nn.Module) -> dict[str, str]:
    """What calibration depends on: the weights of the model, and how its quantizers observe."""
    found = quantizers(model)
    inside = tuple(f"{name}." for name in found)
    weights = {n: t for n, t in model.state_dict().items() if not n.startswith(inside)}
    recipe = {
        n: (str(q.spec), q.observer_name, repr(q.observer._given[1]), q.enabled, q.fixed) for n, q in found.items()
    }
    return {"model": digest_of(weights), "recipe": digest_of(recipe)}


class ObservingProgress:
    """Keeps the state of observers in a checkpoint, and goes on from there.

    Args:
        folder: where the checkpoint is.
        job: its name.
        model: the model that is calibrated.
        seeing: the quantizers that observe batches, by name.
    """

    def __init__(
        self, folder: str | os.PathLike[str], job: str, model: nn.Module, seeing: Mapping[str, TensorQuantizer]
    ) -> None:
        self._seeing, self._signals = seeing, DelayedSignals()
        self._file = Checkpoint(folder, job, identity_of(model))
        self._state()  # an observer that does not say what it keeps is refused now, not after an hour
        self.done, self._digest, self._expected = 0, "", ""
        saved = self._file.read()
        if saved is not None:
            self.done, self._expected = int(saved.data["batches"]), str(saved.data["data"])
            for name, quantizer in seeing.items():
                mine = {k.removeprefix(f"{name}:"): t for k, t in saved.tensors.items() if k.startswith(f"{name}:")}
                quantizer.observer.load_state_tensors(mine)

    def has(self, inputs: Inputs, number: int) -> bool:
        """Whether batch ``number`` was seen before; raise if another one was."""
        self._digest = digest_of([self._digest, inputs.args, inputs.kwargs])
        if number == self.done and self._digest != self._expected:
            raise SaveError(
                f"the checkpoint {str(self._file.path)!r} is of other data, or of the same in another order: its "
                f"{number} batches are not the first {number} of these; remove it to start over"
            )
        return number <= self.done

    def keep(self, number: int, *, last: bool = False) -> None:
        """After a batch, or all of them: write what was seen, if it is time to; then let signals take effect."""
        if number < self.done:
            raise SaveError(
                f"the checkpoint {str(self._file.path)!r} has {self.done} batches, but the data only {number}; remove "
                "it to start over"
            )
        if last or self._signals.noted is not None or self._file.due:
            self._file.write(self._state(), {"batches": number, "data": self._digest})
            self._signals.deliver()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._signals.__exit__(*error)

    def _state(self) -> dict[str, Tensor]:
        return {f"{n}:{key}": t for n, q in self._seeing.items() for key, t in q.observer.state_tensors().items()}
