"""Plots as SVG that follows Jupyter's theme: instant, no library, and text a test can read."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _ROW, _LABEL, _VALUE = 680, 30, 210, 90
_INK = "var(--jp-ui-font-color1, #222)"
_BAR = "var(--jp-brand-color1, #1976d2)"


def bar_chart(title: str, labels: Sequence[str], values: Sequence[float], unit: str = "") -> str:
    """Horizontal bars, longest value across the whole width; the title says what the picture claims."""
    top = max([*values, 1e-12])
    height = 40 + _ROW * len(values)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="100%" style="max-width:{_WIDTH}px" role="img" aria-label="{escape(title)}" '
        f'font-family="sans-serif" font-size="13">',
        f'<text x="0" y="20" font-weight="600" fill="{_INK}">{escape(title)}</text>',
    ]
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = 40 + i * _ROW
        length = max(1.0, (_WIDTH - _LABEL - _VALUE) * value / top)
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end" fill="{_INK}">{escape(label)}</text>')
        parts.append(f'<rect x="{_LABEL}" y="{y}" width="{length:.1f}" height="20" rx="3" fill="{_BAR}"/>')
        parts.append(
            f'<text x="{_LABEL + length + 6:.1f}" y="{y + 14}" fill="{_INK}">{value:.3g} {escape(unit)}</text>'
        )
    return "".join([*parts, "</svg>"])
