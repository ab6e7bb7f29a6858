"""Progress of a block-by-block calibration: what observers have seen, and the values that later blocks read.

One file records the progress, and is replaced as a whole. The values are in files beside it, one per node and batch,
written before that file names them and removed after it no longer does.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor, fx, nn

from bitwright.checkpoints import Checkpoint
from bitwright.errors import SaveError
from bitwright.observer_state import identity_of, load_state, state_of
from bitwright.quantizer import TensorQuantizer
from bitwright.reconstruction.block_values import CannotPack, Values, pack, unpack
from bitwright.signals import DelayedSignals


class Place(NamedTuple):
    """How far a job has come: blocks that are done, and batches that went through the next one."""

    blocks: int = 0
    batches: int = 0


class BlockProgress:
    """Keeps a job's results in a checkpoint, and continues from there."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        job: str,
        model: nn.Module,
        graph: fx.GraphModule,
        seeing: Mapping[str, TensorQuantizer],
        data: str,
    ) -> None:
        self._identity = {**identity_of(model), "data set": data}
        self._file = Checkpoint(folder, job, self._identity)
        self._beside = Path(folder) / job
        self._nodes = {f"{number:05}": node for number, node in enumerate(graph.graph.nodes)}
        self._numbers = {node: number for number, node in self._nodes.items()}
        self._seeing, self._signals = seeing, DelayedSignals()
        self._held: set[str] = set()  # the names of the values in files
        state_of(seeing)  # an observer that does not define what it keeps is refused now, not after an hour

    def restore(self, values: Values) -> Place:
        """Restore observers and values; return how far the job had come."""
        saved = self._file.read()
        if saved is None:
            return Place()
        with self._file.blamed():
            load_state(self._seeing, saved.tensors)
            for name in saved.data["values"]:
                number, _, _ = name.partition("-")
                values.add(self._nodes[number], self._read(name))
                self._held.add(name)
            return Place(*map(int, saved.data["place"]))

    def _read(self, name: str) -> Any:  # noqa: ANN401
        file = self._value_file(name)
        saved = file.read()
        if saved is None:
            where = str(self._file.path)
            raise SaveError(f"the checkpoint {where!r} lacks {str(file.path)!r}; remove it to start over")
        with file.blamed():
            return unpack(saved.data["value"], saved.tensors)

    def _value_file(self, name: str) -> Checkpoint:
        return Checkpoint(self._beside, name, self._identity)

    def keep(self, place: Place, values: Values) -> None:
        """After a batch or a block, write the results if it is time to; then let signals take effect."""
        if place.batches == 0 or self._signals.noted is not None or self._file.due:
            self._write(place, values)
            self._signals.deliver()

    def _write(self, place: Place, values: Values) -> None:
        try:
            names = [self._keep_value(*each) for each in values.computed()]
        except CannotPack:  # a later block may no longer read it
            return
        self._file.write(state_of(self._seeing), {"place": list(place), "values": names})
        for name in self._held.difference(names):
            self._value_file(name).path.unlink(missing_ok=True)
        self._held = set(names)

    def _keep_value(self, node: fx.Node, batch: int, value: object) -> str:
        name = f"{self._numbers[node]}-{batch:06}"
        if name not in self._held:
            tensors: dict[str, Tensor] = {}
            plain = pack(value, tensors)
            self._value_file(name).write(tensors, {"value": plain})
            self._held.add(name)
        return name

    def finish(self) -> None:
        """Remove what only an unfinished job needs."""
        shutil.rmtree(self._beside, ignore_errors=True)

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self._signals.__exit__(*given)
