"""Tables as HTML that follows Jupyter's light and dark theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from shoal.ui.theme import INK, LINE

_CELL = f"padding:3px 10px;border-bottom:1px solid {LINE};vertical-align:top"


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are escaped; numbers align to the right."""
    head = "".join(f'<th scope="col" style="text-align:left;{_CELL}">{escape(str(cell))}</th>' for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    style = f"color:{INK};border-collapse:collapse;line-height:1.35;margin:4px 0"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f'<td style="text-align:left;{_CELL}">{escape(str(value))}</td>'
    shown = f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"
    return f'<td style="text-align:right;{_CELL}">{shown}</td>'
