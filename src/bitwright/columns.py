"""Tables as plain text, for results that print themselves."""

from collections.abc import Sequence


def in_columns(header: Sequence[str], rows: Sequence[Sequence[str]], always: int = 1) -> list[str]:
    """The lines of a table, its numbers to the right; empty columns are left out, but not the first ``always``."""
    kept = [c for c in range(len(header)) if c < always or any(row[c] for row in rows)]
    columns = [_aligned(header[c], [row[c] for row in rows], names=c == 0) for c in kept]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _aligned(name: str, cells: list[str], *, names: bool) -> list[str]:
    width = max(map(len, [name, *cells]))
    right = not names and any(cells) and all(_is_number(cell) for cell in cells if cell)
    return [cell.rjust(width) if right else cell.ljust(width) for cell in [name, *cells]]


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("%").replace(",", ""))
    except ValueError:
        return False
    return True
