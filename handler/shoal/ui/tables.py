"""Tables as HTML that follows Jupyter's light and dark theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are escaped; numbers align to the right."""
    head = "".join(f'<th scope="col" style="text-align:left">{escape(str(cell))}</th>' for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f'<td style="text-align:left">{escape(str(value))}</td>'
    return f'<td style="text-align:right">{value:.3g}</td>' if isinstance(value, float) else f"<td>{value}</td>"
