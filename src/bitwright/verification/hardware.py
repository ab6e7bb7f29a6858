"""Notes on a file that hold for the CPU it was run on."""

import numpy as np

from bitwright.cpu import has_vnni
from bitwright.exporting import ExportRecord, LoadedFile

_SATURATES = (
    "this CPU has no VNNI: it adds pairs of u8×s8 products in 16 bits, which saturate with 8-bit weights; "
    "7-bit weights (the default) are safe"
)

_ONE_THREAD = (
    "{} ran in one thread. With more, onnxruntime divides a batch among them, and each finds the ranges of the hidden "
    "states of its own sequences: results differ slightly from the simulation, unless the batch has one sample"
)


def hardware_notes(file: LoadedFile, record: ExportRecord) -> list[str]:
    """What to know of this CPU and this file."""
    weights = (file.constant(t.tensor) for t in record.tensors if t.kind == "weight" and t.tensor)
    wide = any(w is not None and w.dtype == np.int8 and np.abs(w.astype(np.int16)).max(initial=0) > 64 for w in weights)
    divided = [o.name for o in record.operators if o.node in _dynamic(file)]
    notes = [_ONE_THREAD.format(", ".join(dict.fromkeys(divided)))] if divided else []
    return notes + ([_SATURATES] if wide and not has_vnni() else [])


def _dynamic(file: LoadedFile) -> set[str]:
    return {node.name for node in file.nodes() if node.type == "DynamicQuantizeLSTM"}
