"""plan: what prepare would do to a model, operator by operator: what was asked, what it gets, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.preparation.ledger import Entry, Ledger, ledger_of
from bitwright.preparation.pipeline import prepare
from bitwright.recipe import Recipe

if TYPE_CHECKING:
    from rich.table import Table

HEADERS = ("name", "operator", "computes", "rule", "asked", "input", "weight", "output", "reason")


@dataclass(frozen=True, repr=False)
class Plan:
    """The ledger of a model that was not changed; it prints as a table, more nicely in a terminal with rich."""

    ledger: Ledger

    @property
    def entries(self) -> list[Entry]:
        return self.ledger.entries

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, in the order of ``HEADERS``."""
        return [
            (e.name, e.operator, e.verdict.value, e.rule, e.asked, e.input, e.weight, e.output, e.reason)
            for e in self.entries
        ]

    def title(self) -> str:
        """The backend and how many operators compute how."""
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in self.ledger.count().items())
        return f"{self.ledger.backend.name}: {counts or 'no operators'}"

    def __str__(self) -> str:
        kept = self._columns()
        table = [[HEADERS[i] for i in kept], *([row[i] for i in kept] for row in self.rows())]
        widths = [max(len(row[c]) for row in table) for c in range(len(kept))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        notes = [f"Note: {note}" for note in self.ledger.notes]
        return "\n".join([self.title(), *lines, *notes])

    __repr__ = __str__

    def __rich__(self) -> "Table":
        from rich.table import Table

        table = Table(title=self.title(), title_justify="left")
        kept = self._columns()
        for i in kept:
            table.add_column(HEADERS[i], overflow="fold")
        for row in self.rows():
            table.add_row(*(row[i] for i in kept))
        return table

    def _columns(self) -> list[int]:
        """The columns with something in them."""
        rows = self.rows()
        return [i for i in range(len(HEADERS)) if i < 3 or any(row[i] for row in rows)]


def plan(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    example_inputs: Any = None,  # noqa: ANN401
    backend: str | Path | Backend | None = None,
    **options: Any,
) -> Plan:
    """Say what :func:`prepare` would do, for each operator: its rule, what is asked, what it gets, and why.

    Args:
        model: the float model; it is left untouched.
        recipe: as for ``prepare``: a Recipe, a mapping, a YAML or JSON file, or the name of a preset.
        example_inputs: as for ``prepare``; the model is captured with them.
        backend: as for ``prepare``.
        options: the other arguments of ``prepare``.

    Returns:
        A table that prints itself; ``entries`` has the rows.
    """
    if example_inputs is None:
        raise ConfigError("plan needs example inputs to capture the model: plan(model, recipe, example_inputs)")
    return Plan(ledger_of(prepare(model, example_inputs, backend, recipe=recipe, **options)))
