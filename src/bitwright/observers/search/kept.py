"""The symmetric range with the least error for kept values, all candidates at once.

In units of the largest magnitude every channel tries the same candidates. A table tells what a value costs with each
of them (``tables.py``); a channel's errors are the sum of its values' rows. Where candidates lie:

- the scale that holds everything costs n values at most (scale / 2)**p each; cutting off more than n**(1/p) half steps
  costs more than that already, so none is below 1 - (n**(1/p) + 1) / levels;
- they start a part of a step apart, as the error of few values has many dips, and grow apart further down.

Then those between the best and its neighbours are tried. Where a table is too coarse for the steps of the format, its
best are tried on the values themselves.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bitwright.numerics import scale_and_zero_point
from bitwright.observers.search.samples import Samples, error
from bitwright.observers.search.tables import COLUMNS, TINY, error_table
from bitwright.spec import QuantSpec

ROWS = 1 << 13  # of a table, at most
ROWS_PER_STEP = 64  # with fewer, where a value lies in its row makes a difference
DENSE, GROWTH, LEAST = 160, 1.06, 0.003  # candidates before they grow apart, by how much, and the least of them
BETWEEN = (-0.8, -0.6, -0.4, -0.2, 0.2, 0.4, 0.6, 0.8)  # on the way to the neighbours of the best
JUDGED = 6  # candidates to try on the values
SMOOTH = 1024  # values, whose error with wide steps has few dips
CLOSE = 0.006  # distance of candidates at which the search ends
TIE = 1e-6


def search_kept(values: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec, p: float) -> tuple[Tensor, Tensor]:
    """The range (channels,) and (channels,) with the least error for values (channels, values) in [lo, hi]."""
    reach = (torch.maximum(-lo, hi) if spec.format.signed else hi).clamp(min=0.0).double().unsqueeze(1)
    unit = reach.clamp(min=TINY)
    unit = torch.exp2(unit.log2().ceil()) if spec.power_of_two else unit
    levels = 2 * spec.qmax if spec.format.signed else spec.qmax
    rows = min(ROWS, max(1 << 10, 1 << (ROWS_PER_STEP * 2 * spec.qmax - 1).bit_length()))
    scan = candidates(values.shape[1], levels, LEAST if spec.power_of_two else 0.0, p)
    costs, at, around = _scan(values, unit, scan, rows, spec, p)
    tops, between, apart = (
        torch.tensor(v, dtype=torch.float64, device=at.device) for v in (scan.tops, scan.between, scan.apart)
    )
    if rows >= ROWS_PER_STEP * 2 * spec.qmax:
        picked = at.unsqueeze(1)
        costs, tops = torch.cat([costs.gather(1, picked), around], 1), torch.cat([tops[picked], between[at]], 1)
        top = (tops.gather(1, _first_least(costs).unsqueeze(1)) * unit).minimum(reach)
    else:
        judged = min(costs.shape[1], JUDGED if rows > 8 * levels else 8 * JUDGED)
        costs, picked = costs.topk(judged, 1, largest=False)
        costs, tops = torch.cat([costs, around], 1), torch.cat([tops[picked], between[at]], 1)
        best = tops.gather(1, costs.topk(judged, 1, largest=False).indices)
        top = _judged(values, (best.sort(1, descending=True).values * unit).minimum(reach), spec, p)
    # Values that lie on a grid, like a constant: the table cannot tell their error, which is next to none.
    on_grid = (costs.amin(1) <= values.shape[1] * (4 / rows) ** p).nonzero().squeeze(1)
    if len(on_grid):
        tops = torch.cat([torch.ones_like(tops[:, :1]), tops], 1) * unit
        top[on_grid] = _judged(values[on_grid], tops.minimum(reach)[on_grid], spec, p)
    top = _closer(values, top, reach, apart[at] / 5, spec, p).squeeze(1)
    return torch.maximum(lo, -top).clamp(max=0.0).float(), torch.minimum(hi, top).clamp(min=0.0).float()


def _scan(
    values: Tensor, unit: Tensor, scan: "Scan", rows: int, spec: QuantSpec, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Errors (channels, candidates) by tables, the place of the best, and the errors between it and its neighbours."""
    index = values * (rows / 2 * (1 - 2.0**-20) / unit).float()
    index = (index if spec.format.signed else index.clamp_(min=0)).add_(rows / 2).to(torch.int32)
    costs = torch.cat([_costs(index, part, rows, spec, p) for part in scan.parts], 1)
    at = _first_least(costs)
    around = costs.new_empty(len(values), len(BETWEEN))
    for place in at.unique().tolist():
        some = (at == place).nonzero().squeeze(1)
        around[some] = _costs(index[some], scan.between[place], rows, spec, p)
    return costs, at, around


def _closer(values: Tensor, top: Tensor, reach: Tensor, apart: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """Look closer around the best where its neighbours are far ``apart``."""
    closer = torch.linspace(-1, 1, 9, dtype=torch.float64, device=values.device)
    while bool((far := apart > CLOSE).any()):
        some = far.nonzero().squeeze(1)
        nearby = (top[some] * (1 + apart[some].unsqueeze(1) * closer)).minimum(reach[some])
        top[some] = _judged(values[some], nearby, spec, p)
        apart = apart / 4
    return top


@dataclass(frozen=True)
class Scan:
    """Parts of the range to try, from 1 down."""

    tops: tuple[float, ...]
    parts: tuple[tuple[float, ...], ...]  # for one table each
    apart: tuple[float, ...]  # how far the neighbours are from each, as a part of it
    between: tuple[tuple[float, ...], ...]  # those between each and its neighbours


@lru_cache(maxsize=64)
def candidates(count: int, levels: int, least: float, p: float) -> Scan:
    """What to try for so many values and levels, down to ``least`` or, if that is 0, as far as it can pay."""
    least = least or max(LEAST, 1 - (count ** (1 / p) + 1) / levels)
    step, tops = min(0.3 / levels, 0.03 if count >= SMOOTH else 0.01), [1.0]
    while tops[-1] > least:
        tops.append(tops[-1] * (1 - step))
        step = min(0.4, step * (GROWTH if len(tops) > DENSE else 1.0))
    last = len(tops) - 1
    apart = tuple(math.sqrt(tops[max(i - 1, 0)] / tops[min(i + 1, last)]) - 1 for i in range(len(tops)))
    between = tuple(
        tuple(min(1.0, top * (1 + part * away)) for part in BETWEEN) for top, away in zip(tops, apart, strict=True)
    )
    parts = tuple(tuple(tops[k : k + COLUMNS]) for k in range(0, len(tops), COLUMNS))
    return Scan(tuple(tops), parts, apart, between)


def _costs(index: Tensor, tops: tuple[float, ...], rows: int, spec: QuantSpec, p: float) -> Tensor:
    return embedding_bag(index, error_table(spec, p, rows, tops).to(index.device), mode="sum")


def _first_least(costs: Tensor) -> Tensor:
    """The first candidate of those that differ from the least by rounding: the order of values does not matter."""
    return (costs <= costs.amin(1, keepdim=True) * (1 + TIE)).to(torch.int8).argmax(1)


def _judged(values: Tensor, tops: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """The best of candidates (channels, candidates) by the values themselves."""
    costs = error(Samples.of_values(values, spec), *scale_and_zero_point(-tops, tops, spec), spec, p)
    return tops.gather(1, _first_least(costs).unsqueeze(1))
