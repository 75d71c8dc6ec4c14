"""Charts as SVG, for a page that needs nothing else to be shown."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 28, 34
_MOST_POINTS = 400
_LEAST, _MOST = 1e-300, 1e300
# What HTML has no character for.
_CONTROL = re.compile(r"[^\t\n -~\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]")

Point = tuple[float, float]


def text(value: object) -> str:
    """Any text as HTML or SVG that shows it and does nothing else."""
    return escape(_CONTROL.sub("\ufffd", str(value)))


def chart(
    title: str,
    curves: Mapping[int, Sequence[Point]],
    log: bool = False,
    bars: Mapping[int, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """An `<svg>` of curves over the steps, the curve `n` in the n-th colour; empty without a point. What is not finite is left out.

    bars: intervals `(step, low, high)` of a curve's points. log: a logarithmic scale, where all values are positive. A curve of
    more than 400 points is drawn through the means of as many parts.
    """
    curves = {number: [point for point in curve if _drawable(*point)] for number, curve in curves.items()}
    bars = {number: [bar for bar in rows if _drawable(*bar)] for number, rows in (bars or {}).items()}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    heights = [y for _, y in points] + [y for rows in bars.values() for _, *ends in rows for y in ends]
    log = log and min(heights) > 0
    low, high = _bounds(heights, log)
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def x(step: float) -> str:
        share = (step - first) / (last - first) if last > first else 0.5
        return f"{_LEFT + share * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        share = (_scaled(value, log) - low) / (high - low)
        return f"{_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}">',
        f'<text x="{_LEFT}" y="16" class="title">{text(title)}</text>',
    ]
    for tick in _ticks(low, high):
        value = 10**tick if log else tick
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" class="tick end">{value:.3g}</text>')
    for step in dict.fromkeys((first, last)):
        anchor = "end" if step == last > first else "start"
        parts.append(f'<text x="{x(step)}" y="{_HEIGHT - 14}" class="tick" text-anchor="{anchor}">{step:g}</text>')
    for number, curve in curves.items():
        colour = COLOURS[number % len(COLOURS)]
        for step, bottom, top in bars.get(number, ()):
            parts.append(f'<line x1="{x(step)}" x2="{x(step)}" y1="{y(bottom)}" y2="{y(top)}" stroke="{colour}"/>')
        drawn = _thinned(curve)
        if len(drawn) < 3 or number in bars:
            parts += [f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" fill="{colour}"/>' for a, b in drawn]
        path = " ".join(f"{x(a)},{y(b)}" for a, b in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"])


def _bounds(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = _scaled(min(values), log), _scaled(max(values), log)
    if not log:
        low = min(low, 0.0)
    return (low, high) if high - low > _LEAST else (low - 0.5, high + 0.5)


def _drawable(*values: float) -> bool:
    """Whether arithmetic on the values stays finite."""
    return all(math.isfinite(value) and abs(value) < _MOST for value in values)


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between the bounds."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) < 6)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(curve: Sequence[Point]) -> list[Point]:
    size = math.ceil(len(curve) / _MOST_POINTS)
    parts = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [(sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part)) for part in parts]
