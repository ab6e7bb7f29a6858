"""Inline SVG and bars, coloured by the page's style sheet so that they follow light and dark."""

import math

from markupsafe import Markup, escape

from bitwright.analysis import Histogram, TensorStats
from bitwright.reporting.text import decibels, interval, number, percent

_WIDTH, _HEIGHT = 640, 120
_FULL_BAR = 60.0  # dB
_POOR, _FAIR = 15.0, 25.0  # dB, below which a bar turns red or amber


def grade(sqnr: float | None) -> str:
    """The style of a signal-to-noise ratio."""
    if sqnr is None or sqnr >= _FAIR:
        return ""
    return "bad" if sqnr < _POOR else "warn"


def bar(sqnr: float | None) -> Markup:
    """A small bar with its value in dB."""
    if sqnr is None:
        return Markup('<span class="none">–</span>')
    width = 100.0 * min(max(sqnr, 1.0), _FULL_BAR) / _FULL_BAR
    return Markup('<span class="db {}"><span>{}</span><i style="--to:{}%"></i></span>').format(
        grade(sqnr), decibels(sqnr), f"{width:.1f}"
    )


def histogram(tensor: TensorStats, label: str) -> Markup:
    """How often values occur, on a logarithmic scale, with values beyond the range shaded."""
    shown = tensor.histogram
    if shown is None:
        return Markup("")
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" class="histogram">',
        f"<title>{escape(_title(tensor, shown, label))}</title>",
    ]
    if tensor.range is not None:
        parts += _beyond(tensor.range, shown)
    parts.append(f'<path class="counts" d="{_bars(shown)}"/>')
    if shown.lo < 0.0 < shown.hi:
        parts.append(_line(_x(0.0, shown), "zero"))
    if tensor.range is not None:
        parts += [_line(_x(edge, shown), "edge") for edge in tensor.range]
    return Markup("".join([*parts, "</svg>"]))


def _title(tensor: TensorStats, shown: Histogram, label: str) -> str:
    text = f"{label}: {sum(shown.counts)} values from {number(shown.lo)} to {number(shown.hi)}"
    if tensor.range is not None:
        text += f", quantized range {interval(tensor.range)}"
    return text + (f", {percent(tensor.clipped)} clipped" if tensor.clipped is not None else "")


def _bars(shown: Histogram) -> str:
    """One path for all bins, each as high as the logarithm of its count."""
    tallest = math.log1p(max(shown.counts)) or 1.0
    width = _WIDTH / len(shown.counts)
    path = []
    for i, count in enumerate(shown.counts):
        if count:
            height = math.log1p(count) / tallest * (_HEIGHT - 6)
            path.append(f"M{i * width:.1f} {_HEIGHT}v{-height:.1f}h{width - 1:.1f}v{height:.1f}z")
    return "".join(path)


def _beyond(range: tuple[float, float], shown: Histogram) -> list[str]:
    left, right = (_x(edge, shown) for edge in range)
    spans = [(0.0, left), (right, _WIDTH - right)]
    return [
        f'<rect class="beyond" x="{x:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}"/>'
        for x, width in spans
        if width > 0.05
    ]


def _x(value: float, shown: Histogram) -> float:
    share = (value - shown.lo) / (shown.hi - shown.lo)
    return min(max(share, 0.0), 1.0) * _WIDTH


def _line(x: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}"/>'
