"""Constraints: rules that a target's makers publish for its files. A new one is one decorated function."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bitwright.backends import Backend
from bitwright.errors import ConfigError
from bitwright.registry import Registry
from bitwright.verification.constraints.view import View
from bitwright.verification.violation import Violation

CONSTRAINTS: Registry["Constraint"] = Registry("constraint")


class Finding(NamedTuple):
    """Where a file breaks a constraint: the node, layer or tensor, what is wrong there, and how to fix it."""

    where: str
    problem: str
    fix: str


Check = Callable[[View], Iterable[Finding]]


@dataclass(frozen=True)
class Constraint:
    """One rule of a target for files.

    Attributes:
        name: its name for backends.
        check: finds where a file breaks it.
        source: where it is published.
        advice: whether the target also runs files that break it, but not as well.
    """

    name: str
    check: Check
    source: str = ""
    advice: bool = False

    @property
    def text(self) -> str:
        """The rule in one line."""
        return (self.check.__doc__ or self.name).strip().splitlines()[0]


def register_constraint(
    name: str, *, source: str = "", advice: bool = False, override: bool = False
) -> Callable[[Check], Check]:
    """Register a function as a constraint; its docstring states the rule.

    It is given a :class:`View` of a file and yields a :class:`Finding` for each place that breaks the constraint. It
    holds for the backends whose ``constraints`` name it, also by a glob such as ``tensorrt-*``.
    """

    def decorate(check: Check) -> Check:
        CONSTRAINTS.register(name, override=override)(Constraint(name, check, source, advice))
        return check

    return decorate


def constraints_of(backend: Backend) -> list[Constraint]:
    """The constraints that a backend names; an unregistered one is refused."""
    names: dict[str, None] = {}
    for pattern in backend.constraints:
        found = CONSTRAINTS.names(pattern) or [pattern]
        names.update(dict.fromkeys(found))
    return [CONSTRAINTS.get(name) for name in names]


def violations_of(constraints: Iterable[Constraint], view: View) -> Iterator[Violation]:
    """Where a file breaks constraints."""
    for constraint in constraints:
        for where, problem, fix in _findings(constraint, view):
            yield Violation(constraint.name, where, problem, fix, constraint.advice)


def _findings(constraint: Constraint, view: View) -> list[Finding]:
    try:
        found = list(constraint.check(view))
    except Exception as error:
        raise ConfigError(f"the constraint {constraint.name!r} failed: {type(error).__name__}: {error}") from error
    wrong = next((f for f in found if not isinstance(f, Finding)), None)
    if wrong is not None:
        raise ConfigError(f"the constraint {constraint.name!r} must yield Finding(where, problem, fix), not {wrong!r}")
    return found
