"""Find the operator that makes a runtime crash, by running ever shorter beginnings of the file."""

from collections.abc import Mapping

import numpy as np

from bitwright.errors import VerifyError
from bitwright.exporting import LoadedFile
from bitwright.verification.isolation.child import RuntimeDied
from bitwright.verification.runtimes.base import Runtime


def where_it_dies(runtime: Runtime, file: LoadedFile, feeds: Mapping[str, np.ndarray]) -> str:
    """The operator, in the user's terms; empty if the file alone does not crash the runtime, or cannot be cut."""
    nodes = file.nodes()
    if not nodes or not _dies(runtime, file, feeds):
        return ""
    alive, dead = 0, len(nodes)  # beginnings with this many operators
    while dead - alive > 1:
        middle = (alive + dead) // 2
        part = file.beginning(middle)
        if part is None:
            return ""
        if _dies(runtime, part, feeds):
            dead = middle
        else:
            alive = middle
    last = nodes[dead - 1]
    record = file.record
    origins = {o.node: o.name for o in record.operators} if record is not None else {}
    return f"{origins[last.name]} ({last.type})" if last.name in origins else f"{last.name} ({last.type})"


def _dies(runtime: Runtime, file: LoadedFile, feeds: Mapping[str, np.ndarray]) -> bool:
    try:
        runtime.open(file)({name: value for name, value in feeds.items() if name in file.inputs})
    except RuntimeDied:
        return True
    except VerifyError:  # a part that it refuses is not what crashes it
        return False
    return False
