"""The one place that shows progress: a bar on a terminal, nothing when redirected."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None, show: bool | None = None) -> Iterator[T]:
    """Yield ``items`` behind a progress bar; ``show=None`` shows it only on a terminal."""
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if total is None:
        total = len(items) if isinstance(items, Sized) else None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task)
