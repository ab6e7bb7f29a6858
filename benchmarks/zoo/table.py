"""The table of the zoo, and how it stands against its goals."""

import statistics
from collections.abc import Callable, Iterable

from rich.table import Table

from benchmarks.zoo.row import Row

FLOAT_EXPORT = "torch's export"
_STEPS = ("prepare", "calibrate", "export", "verify")
_COLUMNS = (
    "family",
    "runtime",
    "captured",
    "sqnr",
    "in integers",
    "gap",
    "proven",
    "speed",
    "prepare s/MB",
    "calibrate s/MB",
    "export s/MB",
    "verify s/MB",
    "export ×",
    "verify ×",
    "stopped by",
)


def as_table(rows: Iterable[Row]) -> Table:
    """One line per family and runtime."""
    table = Table(title="The zoo: small inputs, random weights, one thread; speed against torch's float file")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", justify="left" if column in _COLUMNS[:2] else "right")
    for row in rows:
        table.add_row(*_cells(row), style="" if row.proven else "red")
    return table


def _cells(row: Row) -> list[str]:
    islands = f"{len(row.islands)} islands" if row.islands else "whole"
    costs = [f"{s.seconds:.1f}/{s.megabytes:.0f}" if (s := row.steps.get(name)) else "–" for name in _STEPS]
    return [
        row.family,
        row.backend,
        islands if "prepare" in row.steps else "no",
        _show(row.sqnr, "{:.0f} dB"),
        _show(row.coverage, "{:.0%}"),
        _show(row.gap, "{}"),
        {True: "yes", False: "no", None: "–"}[row.proven],
        _show(row.speed, "{:.2f}"),
        *costs,
        _show(row.ratio("export", FLOAT_EXPORT), "{:.2f}"),
        _show(row.ratio("verify", "export"), "{:.2f}"),
        f"{row.step}: {row.error[:60]}" if row.error else "",
    ]


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def summary(rows: list[Row]) -> list[str]:
    """Say for each goal what was reached."""
    lines = []
    for backend in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == backend]
        coverage = [row.coverage for row in own if row.coverage is not None]
        speed = [row.speed for row in own if row.speed is not None]
        lines += [
            f"{backend}: {len(own)} families",
            f"  captured whole: {_share(own, lambda r: r.captured and not r.islands)}",
            f"  exported: {_share(own, lambda r: r.exported)}",
            f"  proven: {_share(own, lambda r: r.proven is True)} (goal: {_PROVEN.get(backend, '100%')} of 60)",
            f"  in integers, median: {_median(coverage, '{:.0%}')} (goal: 100%)",
            f"  slower than float: {sum(s < 1 for s in speed)} of {len(speed)} (goal: 0); "
            f"median speed {_median(speed, '{:.2f}')}",
            f"  export over torch's: {_against(own, 'export', FLOAT_EXPORT)} (goal: at most 1.3)",
            f"  verify over export: {_against(own, 'verify', 'export')} (goal: at most 3)",
        ]
    return lines


_PROVEN = {"openvino": "95%"}


def _share(rows: list[Row], holds: Callable[[Row], bool]) -> str:
    count = sum(holds(row) for row in rows)
    return f"{count} of {len(rows)}, {count / max(len(rows), 1):.0%}"


def _median(values: list[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "–"


def _against(rows: list[Row], step: str, to: str) -> str:
    ratios = [(ratio, row.family) for row in rows if (ratio := row.ratio(step, to)) is not None]
    if not ratios:
        return "–"
    most, family = max(ratios)
    return f"median {statistics.median(r for r, _ in ratios):.2f}, most {most:.2f} ({family})"
