"""Regular expressions in rules, matched in time polynomial in the name's length.

Python's ``re`` tries one way after another and may take forever on ``(a+)+x``. Here every part of an expression returns
all positions where it can end if it starts at a given one, and it does so only once for each position.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from bitwright.errors import ConfigError

_LONGEST = 500  # characters of an expression
_STEPS = 300_000  # steps of one comparison, which ends within a second

_REFUSED = {
    "(?P=": "it refers back to a group",
    "(?(": "it depends on a group",
    "(?>": "it has an atomic group",
}
_FLAGS = re.compile(r"\(\?([aimsu]*)(?:-([ims]+))?([:)])")
_NAMED = re.compile(r"\(\?P<\w+>")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0[0-7]{0,2}|[0-7]{3}|N\{[^}]*\}|.)", re.DOTALL
)
_ANCHORS = ("^", "$", r"\b", r"\B", r"\A", r"\Z")


class _Matching:
    """One name being compared, and the work spent on it."""

    def __init__(self, text: str) -> None:
        self.text, self.steps = text, 0
        self.known: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, part: "_Part", at: int) -> frozenset[int]:
        """Where ``part`` can end if it starts at a position."""
        key = id(part), at
        if key not in self.known:
            self._work(1)
            self.known[key] = frozenset(part(self, at))
        return self.known[key]

    def all_ends(self, part: "_Part", places: Iterable[int]) -> frozenset[int]:
        """Where ``part`` can end if it starts at any of the positions."""
        found: set[int] = set()
        for at in places:
            ends = self.ends(part, at)
            self._work(1 + len(ends) // 16)
            found |= ends
        return frozenset(found)

    def _work(self, steps: int) -> None:
        self.steps += steps
        if self.steps > _STEPS:
            raise TimeoutError


_Part = Callable[[_Matching, int], Iterable[int]]


class Expression:
    """A regular expression that must match whole names, as with ``re.fullmatch``.

    Raises a ConfigError for invalid expressions, and for the few constructs that depend on how an expression is
    matched: references to groups, atomic groups and possessive repetitions.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ConfigError(f"'re:{text[:80]}' cannot be used: it has {len(text)} characters, more than {_LONGEST}")
        try:
            flags = re.compile(text).flags
            if flags & re.VERBOSE:
                raise ValueError("it uses the flag x")
            self._part = _Parser(text, flags & ~re.UNICODE).whole()
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"'re:{text[:80]}' is not a regular expression: {error}") from error
        except ValueError as error:
            raise ConfigError(f"'re:{text[:80]}' cannot be used: {error}") from error

    def fits(self, name: str) -> bool:
        """Whether the expression matches the whole name."""
        matching = _Matching(name)
        try:
            return len(name) in matching.ends(self._part, 0)
        except (TimeoutError, RecursionError) as error:
            raise ConfigError(f"'re:{self.text[:80]}' takes too long over {name[:80]!r}") from error


@lru_cache(256)
def expression(text: str) -> Expression:
    """The expression for a string, parsed once."""
    return Expression(text)


class _Parser:
    """Parses an expression that ``re`` accepted."""

    def __init__(self, text: str, flags: int) -> None:
        self.text, self.at, self.flags = text, 0, flags

    def whole(self) -> _Part:
        part = self._choice()
        if self.at != len(self.text):
            raise ValueError(f"{self.text[self.at :][:20]!r} is not understood")
        return part

    def _choice(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _any_of(parts)

    def _sequence(self) -> _Part:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            part = self._atom()
            if part is not None:
                parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else _in_turn(parts)

    def _repeated(self, part: _Part) -> _Part:
        while (count := self._count()) is not None:
            if self._take("+"):
                raise ValueError("it has a possessive repetition, such as a*+")
            self._take("?")  # lazy or not, the whole name must match
            part = _repeat(part, *count)
        return part

    def _count(self) -> tuple[int, int | None] | None:
        for sign, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return count
        found = _COUNT.match(self.text, self.at)
        if found is None or found.group() == "{}" or (found[2] == "" and not found[1]):
            return None
        self.at = found.end()
        low = int(found[1] or 0)
        return low, (int(found[3]) if found[3] else None) if found[2] else low

    def _atom(self) -> _Part | None:
        """The next part, or None for a comment or a setting."""
        sign = self.text[self.at]
        if sign == "(":
            return self._group()
        piece = self._class() if sign == "[" else sign
        if sign == "\\":
            piece = _ESCAPE.match(self.text, self.at)[0]  # pyrefly: ignore  (re has accepted it)
            if piece[1] in "123456789" and not re.fullmatch(r"\\[0-7]{3}", piece):
                raise ValueError(_REFUSED["(?P="])
        self.at += len(piece)
        compiled = re.compile(piece if sign != "{" else r"\{", self.flags)
        return _place(compiled) if piece in _ANCHORS else _letter(compiled)

    def _class(self) -> str:
        end = self.at + 1
        end += self.text.startswith("^", end)
        end += self.text.startswith("]", end)
        while self.text[end] != "]":
            end += 2 if self.text[end] == "\\" else 1
        return self.text[self.at : end + 1]

    def _group(self) -> _Part | None:
        why = next((why for start, why in _REFUSED.items() if self._starts(start)), None)
        if why is not None:
            raise ValueError(why)
        if self._take("(?#"):
            self.at = self.text.index(")", self.at) + 1
            return None
        for start, make in _LOOKS.items():
            if self._take(start):
                return make(self._inside())
        before = self.flags
        settings = _FLAGS.match(self.text, self.at)
        named = _NAMED.match(self.text, self.at)
        self.at = (settings or named).end() if settings or named else self.at + 1  # pyrefly: ignore
        if settings is not None:
            self.flags = _changed(self.flags, settings[1], settings[2] or "")
            if settings[3] == ")":  # for all of the expression
                return None
        part = self._inside()
        self.flags = before
        return part

    def _inside(self) -> _Part:
        part = self._choice()
        if not self._take(")"):
            raise ValueError(f"{self.text[self.at :][:20]!r} is not understood")
        return part

    def _starts(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        found = self._starts(text)
        self.at += len(text) * found
        return found


def _changed(flags: int, on: str, off: str) -> int:
    for letter in on:
        flags |= getattr(re, letter.upper())
    for letter in off:
        flags &= ~getattr(re, letter.upper())
    return flags & ~re.UNICODE


def _letter(pattern: re.Pattern[str]) -> _Part:
    return lambda m, at: [at + 1] if at < len(m.text) and pattern.fullmatch(m.text, at, at + 1) else []


def _place(pattern: re.Pattern[str]) -> _Part:
    return lambda m, at: [at] if pattern.match(m.text, at) else []


def _any_of(parts: Sequence[_Part]) -> _Part:
    return lambda m, at: frozenset().union(*(m.ends(part, at) for part in parts))


def _in_turn(parts: Sequence[_Part]) -> _Part:
    def run(m: _Matching, at: int) -> Iterable[int]:
        places = frozenset({at})
        for part in parts:
            places = m.all_ends(part, places)
        return places

    return run


def _repeat(part: _Part, low: int, high: int | None) -> _Part:
    """Match ``part`` from ``low`` to ``high`` times in a row.

    After as many times as the name has letters, only what matches nothing can have gone on: the places stay the same.
    """

    def run(m: _Matching, at: int) -> Iterable[int]:
        rounds = len(m.text) + 1
        places = frozenset({at})
        for _ in range(min(low, rounds)):
            places = m.all_ends(part, places)
        found, new = set(places), places
        for _ in range(rounds if high is None else min(high - low, rounds)):
            new = m.all_ends(part, new) - found
            if not new:
                break
            found |= new
        return found

    return run


def _ahead(part: _Part) -> _Part:
    return lambda m, at: [at] if m.ends(part, at) else []


def _not_ahead(part: _Part) -> _Part:
    return lambda m, at: [] if m.ends(part, at) else [at]


def _behind(part: _Part) -> _Part:
    return lambda m, at: [at] if any(at in m.ends(part, start) for start in range(at + 1)) else []


def _not_behind(part: _Part) -> _Part:
    return lambda m, at: [] if any(at in m.ends(part, start) for start in range(at + 1)) else [at]


_LOOKS: dict[str, Callable[[_Part], _Part]] = {"(?=": _ahead, "(?!": _not_ahead, "(?<=": _behind, "(?<!": _not_behind}
