"""Measured: damages by name, found once, kept in a checkpoint, and the same on all ranks."""

import json
import os
from collections.abc import Callable

from bitwright.bit_search.damage import Damage
from bitwright.checkpoints import Checkpoint
from bitwright.distributed import rank
from bitwright.errors import SaveError


class Measured:
    """The measurements of a job so far; rank 0 keeps them in a checkpoint, if there is a folder."""

    def __init__(self, damage: Damage, job: str, folder: str | os.PathLike[str] | None) -> None:
        self._ranks, self._file = damage.ranks, None
        self._found: dict[str, float] = {}
        if folder is None and self._ranks.alone:
            return
        identity = damage.identity()
        with self._ranks.together(SaveError):
            if folder is not None and rank() == 0:
                self._file = Checkpoint(folder, job, identity)
                saved = self._file.read()
                with self._file.blamed():
                    known = {} if saved is None else saved.data["found"]
                    self._found = {name: float(value) for name, value in known.items()}
        self._found = json.loads(self._ranks.gather(json.dumps(self._found).encode())[0])

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """The damage of this name, measured and stored unless already known."""
        if name not in self._found:
            self._found[name] = measure()
            with self._ranks.together(SaveError):
                if self._file is not None:
                    self._file.write({}, {"found": self._found})
        return self._found[name]
