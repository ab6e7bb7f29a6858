"""Changes: whether a file is what export writes for the model now, part by part.

Runs compare only what their data reaches; a bias that no sample lifts above its neighbour, or a limit that none
exceeds, stays unseen there.
"""

import os
import tempfile
from dataclasses import replace

from torch import nn

from bitwright.errors import BitwrightError
from bitwright.exporting import ExportedFile, ExportRecord, LoadedFile
from bitwright.exporting.contents import differences
from bitwright.exporting.making import Making, versions_of
from bitwright.exporting.pipeline import export_again
from bitwright.files import scratch_folder
from bitwright.verification.limits import NO_LIMITS
from bitwright.verification.proof import Proof


def add_changes(
    proof: Proof, model: nn.Module, file: LoadedFile, record: ExportRecord, path: str | os.PathLike[str]
) -> None:
    """Compare a file with what ``export`` writes, unless no limit asks for that."""
    limits = proof.limits
    if limits is not None and limits.changes is None:
        return
    if isinstance(path, ExportedFile) and path.is_unchanged():
        proof.changes = []
        return
    try:
        with scratch_folder(tempfile.gettempdir()) as folder:
            proof.changes, why = _compared(file, record, export_again(model, file, record, folder))
    except BitwrightError as error:
        why = str(error)
    missed = (limits or NO_LIMITS).exceeded_by(proof.changes, why)
    proof.missed += missed
    if why and not missed:
        proof.notes.append(f"not compared with what export writes for this model: {why}")


def _compared(file: LoadedFile, record: ExportRecord, again: LoadedFile) -> tuple[list[str] | None, str]:
    """What differs, or None and why that tells nothing."""
    ours, theirs = again.contents(), file.contents()
    if ours is None or theirs is None:
        return None, f"files of the format {record.format} have no contents to compare"
    found = differences(ours, theirs)
    if again.record is None or replace(again.record, making=record.making) != record:
        found.append("its record differs")
    then, now = Making.noted_in(record).versions, versions_of(Making.noted_in(record).versions)
    if found and then != now:
        other = ", ".join(
            f"{name} {then[name]}, not {now.get(name, 'any')}" for name in then if then[name] != now.get(name)
        )
        return None, f"it was written with {other}, and differs from what these write; export again"
    return found, ""
