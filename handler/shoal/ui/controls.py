"""What panels are built of: their frame, a spoken status line, a slider with a name."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets as widgets
import traitlets

from shoal.ui.theme import FAINT_INK, INK, LINE

if TYPE_CHECKING:
    from shoal.ui.jobs import Job, JobView

_STATUS_JS = """
function render({ model, el }) {
  const line = document.createElement("div");
  line.className = "shoal-status";
  line.setAttribute("role", model.get("alert") ? "alert" : "status");
  const show = () => {
    line.textContent = model.get("value");
    line.style.display = model.get("alert") && !model.get("value") ? "none" : "";
  };
  if (model.get("alert")) line.classList.add("shoal-alert");
  model.on("change:value", show);
  el.appendChild(line);
  show();
  return () => model.off("change:value", show);
}
export default { render };
"""

_STATUS_CSS = """
.shoal-status {
  color: var(--jp-ui-font-color1, #222); font-family: var(--jp-ui-font-family, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px); padding: 2px 8px; overflow-wrap: anywhere;
}
.shoal-alert {
  border-left: 4px solid var(--jp-error-color1, #d32f2f); margin: 4px 0; padding: 6px 10px;
  background: var(--jp-layout-color2, #eee);
}
"""


class StatusLine(anywidget.AnyWidget):
    """One line of text that screen readers speak as it changes; as an alert it stands out, and hides when empty."""

    _esm, _css = _STATUS_JS, _STATUS_CSS
    value = traitlets.Unicode("").tag(sync=True)
    alert = traitlets.Bool(False).tag(sync=True)


def number_slider(
    owner: traitlets.HasTraits, trait: str, label: str, least: float, most: float, step: float = 1
) -> widgets.HBox:
    """A slider and a number box for one numeric trait. The box carries the name for keyboards and screen readers, since
    the slider's handle cannot have one.
    """
    value = getattr(owner, trait)
    whole = isinstance(owner.traits()[trait], traitlets.Int)
    slider_class, box_class = (
        (widgets.IntSlider, widgets.BoundedIntText) if whole else (widgets.FloatSlider, widgets.BoundedFloatText)
    )
    bounds = {"value": value, "min": least, "max": most, "step": step}
    box = box_class(description=label, style={"description_width": "11em"}, layout={"width": "17em"}, **bounds)
    slider = slider_class(readout=False, layout={"width": "240px"}, **bounds)
    slider.tooltip = label
    traitlets.link((owner, trait), (box, "value"))
    traitlets.link((owner, trait), (slider, "value"))
    return widgets.HBox([box, slider], layout={"flex_flow": "row wrap", "align_items": "center"})


class Panel:
    """What all panels are: something that a cell shows as its last line. Subclasses set these."""

    state: Job
    job: JobView
    view: widgets.Widget

    async def press(self, button: str) -> str:
        """Press a run button as a person would, and wait in a cell until its work has ended; returns the status."""
        self.job.run_buttons[button].click()
        await self.state.wait()
        return self.state.status

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.view._repr_mimebundle_(**options)


def panel(title: str, korean: str, children: Sequence[widgets.Widget]) -> widgets.VBox:
    """A framed box under a heading in both languages."""
    heading = widgets.HTML(
        f'<h4 style="margin:0 0 4px;color:{INK}">{escape(title)} '
        f'<span lang="ko" style="font-weight:400;color:{FAINT_INK}">· {escape(korean)}</span></h4>'
    )
    return widgets.VBox(
        [heading, *children],
        layout={"border": f"1px solid {LINE}", "padding": "10px 14px", "max_width": "860px", "overflow": "visible"},
    )


def note(text: str) -> widgets.HTML:
    """A line of explanation."""
    return widgets.HTML(f'<div style="color:{FAINT_INK};line-height:1.4">{escape(text)}</div>')
