"""NNIE: what its grid is, and which operators its parameter file speaks of."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bitwright.exporting.formats.nnie import has_entry, sources
from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.view import View

_SOURCE = "ModelTC/MQBench, deploy_nnie.py"
_MEND = "prepare the model for the backend nnie, without rules that change its tensors"
_STEPS = 16  # levels per factor of two
_LEVELS = 256


@register_constraint("nnie-levels", source=_SOURCE)
def levels(view: View) -> Iterator[Finding]:
    """A tensor has 256 levels: 0, and powers of 2^(1/16) up to the largest, the lowest of them positive only."""
    for t in view.tensors:
        yield Finding(t.name, f"has evenly spaced integers ({t.type})", _MEND)
    for table in _tables(view):
        if table.levels.size == _LEVELS and not _logarithmic(table.levels):
            yield Finding(table.name, "has levels that are not powers of 2^(1/16)", _MEND)


@register_constraint("nnie-scales", source=_SOURCE)
def one_table(view: View) -> Iterator[Finding]:
    """Every tensor has one table."""
    for table in _tables(view):
        if table.levels.size != _LEVELS:
            yield Finding(table.name, f"has {table.levels.size} levels, not the {_LEVELS} of one table", _MEND)


@register_constraint("nnie-entries", source=_SOURCE, advice=True)
def entries(view: View) -> Iterator[Finding]:
    """Quantized tensors are read by an operator that the parameter file has an entry for: NNIE calibrates others."""
    tables = {t.result: t.name for t in _tables(view) if not t.stored}
    known = sources(view.nodes, tables)
    said = {known.get(name) for node in view.nodes if has_entry(node) for name in node.input}
    for result in tables.keys() - said:
        if readers := view.readers.get(result):
            problem = f"is read by {view.named(readers[0])} only, and has no entry in the parameter file"
            yield Finding(tables[result], problem, "calibrate NNIE with the same data")


class _Table(NamedTuple):
    """A table of a file: what users call its tensor, what it gives, its levels, and whether it is a constant's."""

    name: str
    result: str
    levels: np.ndarray
    stored: bool


def _tables(view: View) -> Iterator[_Table]:
    known = {t.tensor: t.name for t in (view.record.tensors if view.record is not None else ())}
    for node in view.operators("Gather"):
        place, levels = view.makers.get(node.input[1]), view.constants.get(node.input[0])
        while place is not None and place.op_type == "Add":  # a table for each channel
            place = view.makers.get(place.input[0])
        if place is not None and levels is not None:
            stored = place.op_type == "Cast"
            name = known.get((place.input if stored else place.output)[0])
            if name is not None:
                yield _Table(name, node.output[0], levels, stored)


def _logarithmic(values: np.ndarray) -> bool:
    sizes = np.abs(values[values != 0]).astype(np.float64)
    steps = _STEPS * np.log2(sizes / sizes.max())
    return bool(np.abs(steps - np.rint(steps)).max() < 1e-3) and int((values > 0).sum()) == _LEVELS // 2
