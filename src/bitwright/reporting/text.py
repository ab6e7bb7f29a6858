"""Format numbers for the report: short, honest (99.99% is not 100%), with a true minus sign."""

import math


def _minus(text: str) -> str:
    """Write a true minus sign, and none before zero."""
    zero = "inf" not in text and not any(digit in text for digit in "123456789")
    return text.lstrip("-+") if zero else text.replace("-", "−")


NOT_MEASURED = "not measured"


def percent(share: float | None, digits: int = 1) -> str:
    """A share from 0 to 1, shown as 0% or 100% only if it is exactly that."""
    if share is None:
        return NOT_MEASURED
    if share in (0.0, 1.0) or not math.isfinite(share):
        return f"{share:.0%}"
    for places in range(digits, 7):
        text = f"{share:.{places}%}"
        if float(text[:-1]) not in (0.0, 100.0):
            return _minus(text)
    return "<0.000001%" if share < 0.5 else ">99.999999%"


def number(value: float) -> str:
    """Four significant digits."""
    return _minus(f"{value:.4g}")


def interval(range: tuple[float, float] | None) -> str:
    """A range of values."""
    return f"{number(range[0])} … {number(range[1])}" if range is not None else ""


def decibels(sqnr: float | None) -> str:
    """A ratio in dB, or "exact" without any error."""
    if sqnr is None:
        return ""
    return "exact" if sqnr == math.inf else _minus(f"{sqnr:.1f} dB")


def megabytes(size: int) -> str:
    """A file size."""
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def change(before: float, after: float, *, percent: bool) -> str:
    """A difference, in percentage points for shares."""
    if before == after:
        return "no change"
    text = f"{(after - before) * 100:+.2f} points" if percent else f"{after - before:+.4g}"
    return _minus(text)


def count(many: int, word: str) -> str:
    """1 layer, 2 layers."""
    return f"{many} {word}{'' if many == 1 else 's'}"


def smaller(size: int, float_size: int, times: str = "x") -> str:
    """How much smaller a file is than the float one, or larger, as small ones can be."""
    ratio = max(float_size, 1) / max(size, 1)
    return f"{ratio:.1f}{times} smaller" if ratio >= 1 else f"{1 / ratio:.1f}{times} larger"
