"""A saved result, or two side by side, as one HTML file: pictures, tables, machine and parameters; nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shoal.errors import RequestError
from shoal.results import Difference, Result, compare_results, figures
from shoal.ui.svg import bar_chart
from shoal.ui.tables import html_table

_MOST_PICTURES = 8

_STYLE = """
:root { color-scheme: light dark; --jp-ui-font-color1: #1f2430; --jp-ui-font-color2: #5b6270;
  --jp-border-color2: #d5d9e0; --jp-layout-color1: #fff; --jp-layout-color2: #f2f4f7;
  --jp-ui-font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --jp-ui-font-color1: #e6e8ee; --jp-ui-font-color2: #a6adbb;
  --jp-border-color2: #3a404c; --jp-layout-color1: #15181f; --jp-layout-color2: #20242d; } }
body { background: var(--jp-layout-color1); color: var(--jp-ui-font-color1); font: 15px/1.5 var(--jp-ui-font-family);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.made { color: var(--jp-ui-font-color2); margin-top: 0; } .wide { overflow-x: auto; } svg { margin: 1rem 0; }
"""


def export_report(results: Result | Sequence[Result], path: str | Path) -> Path:
    """Write a report of one result, or of two of one kind compared, as an HTML file that needs no other.

    Raises:
        RequestError: none or more than two, two that cannot be compared, or a file that cannot be written.
    """
    chosen = [results] if isinstance(results, Result) else list(results)
    if not 1 <= len(chosen) <= 2:
        raise RequestError(f"a report is of one result or of two, not of {len(chosen)}")
    path = Path(path)
    try:
        path.write_text(render_report(chosen), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from None
    return path


def render_report(results: Sequence[Result]) -> str:
    """The HTML of one or two results."""
    first = results[0]
    body = _one(first) if len(results) == 1 else _both(first, results[1])
    title = escape(first.title if len(results) == 1 else f"{first.title}: before and after")
    made = " and ".join(f"{result.made:%Y-%m-%d %H:%M} UTC" for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{title}</h1><p class="made">{escape(made)}, {escape(first.kind)}</p>'
        f"{body}{_conditions(results)}</body></html>\n"
    )


def comparison_chart(differences: Sequence[Difference], column: str) -> str:
    """A picture of one column of two results: two bars a row, before and after."""
    rows = [d for d in differences if d.column == column]
    if not rows:
        raise RequestError(f"{column!r} is in none of the two results: {sorted({d.column for d in differences})}")
    labels = [label for d in rows for label in (f"{d.row}, before", f"{d.row}, after")]
    values = [max(0.0, value) for d in rows for value in (d.first, d.second)]
    known = [d for d in rows if d.ratio is not None]
    largest = max(known, key=lambda d: max(d.ratio, 1 / d.ratio if d.ratio > 0 else 1.0), default=None)
    said = f": {largest.row} went to {largest.ratio:.2f} times" if largest else ""
    return bar_chart(f"{column}{said}", labels, values)


def comparison_table(differences: Sequence[Difference]) -> str:
    """All figures of two results, as an HTML table."""
    rows = [(d.row, d.column, d.first, d.second, "" if d.ratio is None else f"{d.ratio:.3g}x") for d in differences]
    return html_table(("row", "figure", "before", "after", "after / before"), rows)


def _one(result: Result) -> str:
    labels = [str(row[result.key]) for row in result.rows]
    parts = ["<h2>Pictures</h2>"]
    for column in figures(result)[:_MOST_PICTURES]:
        values = [max(0.0, float(row.get(column) or 0.0)) for row in result.rows]
        parts.append(bar_chart(column, labels, values))
    columns = list(dict.fromkeys([result.key, *(column for row in result.rows for column in row)]))
    rows = [tuple("" if row.get(column) is None else row[column] for column in columns) for row in result.rows]
    return "".join(parts) + f'<h2>Figures</h2><div class="wide">{html_table(columns, rows)}</div>'


def _both(first: Result, second: Result) -> str:
    differences = compare_results(first, second)
    columns = list(dict.fromkeys(d.column for d in differences))
    pictures = "".join(comparison_chart(differences, column) for column in columns[:_MOST_PICTURES])
    return f'<h2>Pictures</h2>{pictures}<h2>Figures</h2><div class="wide">{comparison_table(differences)}</div>'


def _conditions(results: Sequence[Result]) -> str:
    """Machine, versions and parameters, a column for each result."""
    names = ("value",) if len(results) == 1 else ("before", "after")
    parts = []
    for title, part in (("Machine", "machine"), ("Versions", "versions"), ("Parameters", "parameters")):
        tables = [getattr(result, part) for result in results]
        keys = list(dict.fromkeys(key for table in tables for key in table))
        rows = [(key, *("" if table.get(key) is None else str(table[key]) for table in tables)) for key in keys]
        if rows:
            parts.append(f"<h2>{title}</h2>{html_table(('', *names), rows)}")
    return "".join(parts)
