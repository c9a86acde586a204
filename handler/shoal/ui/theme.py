"""Colours of tables, plots and panels: JupyterLab's own, so that light and dark follow by themselves. Strings alone."""

from __future__ import annotations

INK = "var(--jp-ui-font-color1, #222)"
FAINT_INK = "var(--jp-ui-font-color2, #555)"
LINE = "var(--jp-border-color2, #ccc)"
# in this order for the series of a plot; each has a dash pattern too, for those who cannot tell them apart
COLOURS = (
    "var(--jp-brand-color1, #1976d2)",
    "var(--jp-warn-color1, #ef6c00)",
    "var(--jp-success-color1, #388e3c)",
    "var(--jp-error-color1, #d32f2f)",
)
DASHES = ("", "6 3", "2 3", "8 3 2 3")
