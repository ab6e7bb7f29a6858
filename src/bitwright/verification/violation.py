"""Violation: a place where a file breaks what its target demands."""

from collections.abc import Iterable
from dataclasses import dataclass

_NAMED = 6  # places that words name


@dataclass(frozen=True)
class Violation:
    """A place where the file breaks what its target's makers demand of files.

    Attributes:
        constraint: the name of what is demanded.
        where: the operator, layer or tensor.
        problem: what is wrong there.
        fix: how to fix it.
        advice: whether the target runs such files all the same, only not as well: it is told, and keeps no proof back.
    """

    constraint: str
    where: str
    problem: str
    fix: str
    advice: bool = False

    def __str__(self) -> str:
        return f"{self.constraint}: {self.where} {self.problem}; {self.fix}"


def violations_in_words(violations: Iterable[Violation]) -> list[str]:
    """One line for all places with the same problem."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for v in violations:
        groups.setdefault((v.constraint, v.problem, v.fix), []).append(v.where)
    lines = []
    for (constraint, problem, fix), places in groups.items():
        more = f" and {len(places) - _NAMED} more: each" if len(places) > _NAMED else ""
        lines.append(f"{constraint}: {', '.join(places[:_NAMED])}{more} {problem}; {fix}")
    return lines
