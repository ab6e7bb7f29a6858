"""Regular expressions in rules: those that a backtracking matcher could take forever over are refused."""

import re
from re import _parser as parser  # pyrefly: ignore  (the only way to see what an expression is made of)
from typing import Any

_LONGEST = 500
_FEW = 4  # a part repeated at most so often, or so many parts repeated without end, cost little
_REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)


def check_expression(text: str) -> None:
    """Raise a ValueError for what is no regular expression, or one that may take exponential time.

    Refused are repetitions of what can itself be matched in several ways, such as ``(a+)+`` and ``(a|ab)*``, and
    more than a few open repetitions one after another, such as ``.*.*.*.*.*``.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text)} characters, more than {_LONGEST}")
        re.compile(text)
        if _count_open(parser.parse(text), inside=False) > _FEW:
            raise ValueError(f"it has more than {_FEW} open repetitions, and could take forever")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"'re:{text[:80]}' is not a regular expression: {error}") from error
    except ValueError as error:
        raise ValueError(f"'re:{text[:80]}' cannot be used: {error}") from error


def _count_open(parsed: Any, *, inside: bool) -> int:  # noqa: ANN401
    """How many repetitions without a small limit there are; ``inside`` of one, nothing may vary."""
    count = 0
    for operator, argument in parsed:
        if operator in _REPEATS:
            low, high, repeated = argument
            if inside and low != high:
                raise ValueError("it repeats what is itself repeated, and could take forever")
            is_open = high > _FEW
            count += is_open + _count_open(repeated, inside=inside or is_open)
        elif inside and operator is parser.BRANCH:
            raise ValueError("it repeats a choice, and could take forever")
        else:
            parts = argument if isinstance(argument, tuple | list) else ()
            count += sum(_count_open(part, inside=inside) for part in _patterns(parts))
    return count


def _patterns(parts: Any) -> list[Any]:  # noqa: ANN401
    """The patterns among the arguments of an operator, such as the branches of a choice."""
    found = []
    for part in parts:
        if isinstance(part, parser.SubPattern):
            found.append(part)
        elif isinstance(part, list):
            found += [p for p in part if isinstance(p, parser.SubPattern)]
    return found
