"""Plots as SVG that follows Jupyter's theme: instant, no library, and text a test can read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from shoal.ui.theme import COLOURS, DASHES, FAINT_INK, INK, LINE

_WIDTH, _ROW = 680, 30
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 300, 64, 16, 52, 46
_LEGEND_CHAR = 7.5  # width of a letter of the legend, on average

Points = Sequence[tuple[float, float]]


def bar_chart(title: str, labels: Sequence[str], values: Sequence[float], unit: str = "") -> str:
    """Horizontal bars, longest value across the whole width; the title says what the picture claims."""
    top = max([*values, 1e-12])
    left = min(320, max(80, 8 + round(7.2 * max((_width(label) for label in labels), default=0))))
    right = 20 + round(7.2 * (_width(unit) + 7))  # room for the figure beside the longest bar
    parts = [_open(title, 40 + _ROW * len(values))]
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = 40 + i * _ROW
        length = max(1.0, (_WIDTH - left - right) * value / top)
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="{INK}">{escape(label)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="20" rx="3" fill="{COLOURS[0]}"/>')
        shown = f"{value:.3g} {escape(unit)}"
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}" fill="{INK}">{shown}</text>')
    return "".join([*parts, "</svg>"])


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str, y_label: str, *, log_x: bool = False, markers: bool = True
) -> str:
    """Lines over common axes that begin at zero (x with `log_x` at its least value, in powers of two).

    Args:
        series: name -> (x, y) in the order to draw; up to four of them differ in colour and dashes.
    """
    points = [point for line in series.values() for point in line]
    highest = _nice(max((y for _, y in points), default=1.0))
    xs = [x for x, _ in points] or [0.0, 1.0]
    low, high = (min(xs), max(xs)) if log_x else (min(0.0, *xs), max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x / low) / (math.log2(high / low) or 1)) if log_x else (x - low) / ((high - low) or 1)
        return _LEFT + along * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _TOP - _BOTTOM)

    ticks = sorted(set(xs)) if log_x else _ticks(low, high)
    parts = [_open(title, _HEIGHT), _axes(place, ticks, highest, x_label, y_label), _legend(list(series))]
    for i, line in enumerate(series.values()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        drawn = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
        )
        if markers:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in drawn]
    return "".join([*parts, "</svg>"])


def dot_chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Dots over common axes that begin at zero, a colour and a shape for each name."""
    points = [point for dots in series.values() for point in dots]
    highest = _nice(max((y for _, y in points), default=1.0))
    high = max((x for x, _ in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / high * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _TOP - _BOTTOM),
        )

    ticks = _ticks(0.0, high)
    parts = [_open(title, _HEIGHT), _axes(place, ticks, highest, x_label, y_label), _legend(list(series), dots=True)]
    for i, dots in enumerate(series.values()):
        parts += [_mark(*place(x, y), i) for x, y in dots]
    return "".join([*parts, "</svg>"])


def span_chart(title: str, spans: Sequence[tuple[float, float, int]], names: Sequence[str], x_label: str) -> str:
    """One thin bar per (from, to, kind), below each other: what was under way when.

    Args:
        names: of the kinds, for the legend.
    """
    row = 12 if len(spans) <= 40 else 480 / len(spans)
    high = max((end for _, end, _ in spans), default=1.0) or 1.0
    height = _TOP + row * len(spans) + _BOTTOM
    parts = [_open(title, height), _legend(list(names), dots=True, square=True)]
    for tick in _ticks(0.0, high):
        x = 8 + tick / high * (_WIDTH - 24)
        anchor = "start" if tick == 0 else "middle" if x < _WIDTH - 30 else "end"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM:.1f}" stroke="{LINE}"/>')
        parts.append(_tick(x, height - _BOTTOM + 16, tick, anchor))
    for i, (begin, end, kind) in enumerate(spans):
        x, width = 8 + begin / high * (_WIDTH - 24), max(1.5, (end - begin) / high * (_WIDTH - 24))
        y, colour = _TOP + i * row, COLOURS[kind % len(COLOURS)]
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{row * 0.75:.1f}" rx="2" fill="{colour}"/>'
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 8}" text-anchor="middle" fill="{FAINT_INK}">{x_label}</text>')
    return "".join([*parts, "</svg>"])


def _open(title: str, height: float) -> str:
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="100%" '
        f'style="max-width:{_WIDTH}px;display:block" role="img" aria-label="{name}" font-family="sans-serif" '
        f'font-size="13"><title>{name}</title><text x="0" y="20" font-weight="600" fill="{INK}">{name}</text>'
    )


def _axes(place, ticks: Sequence[float], highest: float, x_label: str, y_label: str) -> str:
    parts = []
    for value in _ticks(0.0, highest):
        _, y = place(ticks[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_tick(_LEFT - 6, y + 4, value, "end"))
    parts += [_tick(place(x, 0)[0], _HEIGHT - _BOTTOM + 18, x, "middle") for x in ticks]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle" fill="{FAINT_INK}">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="14" y="{(_TOP + _HEIGHT - _BOTTOM) / 2}" text-anchor="middle" fill="{FAINT_INK}" '
        f'transform="rotate(-90 14 {(_TOP + _HEIGHT - _BOTTOM) / 2})">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _legend(names: Sequence[str], *, dots: bool = False, square: bool = False) -> str:
    """Names with their marks in a line under the title; none where there is but one."""
    if len(names) < 2:
        return ""
    parts, x = [], 8.0
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        if square:
            parts.append(f'<rect x="{x}" y="31" width="12" height="9" rx="2" fill="{colour}"/>')
        elif dots:
            parts.append(_mark(x + 6, 36, i))
        else:
            dash = DASHES[i % len(DASHES)]
            parts.append(
                f'<line x1="{x}" x2="{x + 24}" y1="36" y2="36" stroke="{colour}" stroke-width="2.5" '
                f'stroke-dasharray="{dash}"/>'
            )
        offset = 18 if dots else 30
        parts.append(f'<text x="{x + offset}" y="40" fill="{INK}">{escape(name)}</text>')
        x += offset + _LEGEND_CHAR * _width(name) + 18
    return "".join(parts)


def _mark(x: float, y: float, kind: int) -> str:
    colour = COLOURS[kind % len(COLOURS)]
    if kind % 2:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _tick(x: float, y: float, value: float, anchor: str) -> str:
    shown = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="{FAINT_INK}">{shown}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers from `low` to `high` at most."""
    step = _nice((high - low) / 8)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _nice(value: float) -> float:
    """The next round number from a value on: 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.999)


def _width(text: str) -> int:
    """In letters; those of Korean, Japanese and Chinese take two."""
    return sum(2 if ord(character) > 0x1100 else 1 for character in text)
