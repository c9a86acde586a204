"""`DevicePanel`: what the machine is, what follows, and how much memory a batch takes."""

from __future__ import annotations

import ipywidgets as widgets
import traitlets

from shoal.config import FISH_SPEECH_1_5, DualARConfig
from shoal.hardware import Machine, MemoryEstimate, compare_with_guide, estimate_memory, inspect_machine
from shoal.ui.controls import Panel, note, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import bar_chart
from shoal.ui.tables import html_table


class DeviceState(Job):
    """The machine as last looked at, and the batch that the estimate is for."""

    machine = traitlets.Instance(Machine)
    batch = traitlets.Int(8, min=1, max=128)
    frames = traitlets.Int(700, min=16, max=8192)  # positions a row, prompt included

    def __init__(self, config: DualARConfig = FISH_SPEECH_1_5, itemsize: int = 2) -> None:
        super().__init__(machine=inspect_machine())
        self.config, self.itemsize = config, itemsize

    def look_again(self) -> None:
        self.post(machine=inspect_machine())

    @property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.config, self.batch, self.frames, itemsize=self.itemsize)


class DevicePanel(Panel):
    """Shows a DeviceState.

    Args:
        config: sizes of the model that the estimate is for; the published Fish Speech 1.5 by default.
        itemsize: bytes per weight: 2 for bfloat16, 4 for float32.
    """

    def __init__(self, config: DualARConfig = FISH_SPEECH_1_5, itemsize: int = 2) -> None:
        self.state = DeviceState(config, itemsize)
        self.job = JobView(self.state, {"Look again": self.state.look_again})
        self.found, self.notes = widgets.HTML(), widgets.HTML()
        self.guide, self.picture = widgets.HTML(), widgets.HTML()
        rows = [
            (f"{a.memory_gb} GB", f"{a.guide[0]} to {a.guide[1]}", a.fits)
            for a in compare_with_guide(config, itemsize=itemsize)
        ]
        self.guide.value = html_table(("GPU memory", "guide's batch", "fits by our estimate"), rows)
        self.view = panel(
            "This machine",
            "이 컴퓨터",
            [
                self.found,
                self.notes,
                self.job.view,
                note("How many requests fit into a GPU's memory, about half a minute of speech each: "),
                self.guide,
                number_slider(self.state, "batch", "batch", 1, 128),
                number_slider(self.state, "frames", "positions a row", 16, 8192, 4),
                self.picture,
            ],
        )
        self.state.observe(lambda _: self._show_machine(), "machine")
        self.state.observe(lambda _: self._draw(), ["batch", "frames"])
        self._show_machine()
        self._draw()

    def _show_machine(self) -> None:
        machine = self.state.machine
        self.found.value = machine._repr_html_()
        self.notes.value = html_table(("what follows",), [(line,) for line in machine.notes])

    def _draw(self) -> None:
        memory = self.state.memory
        parts = [memory.weights / 1e9, memory.kv_cache / 1e9, memory.codec / 1e9]
        title = f"A batch of {self.state.batch} takes {memory.total / 1e9:.2f} GB"
        self.picture.value = bar_chart(title, ["weights", "KV cache", "codec"], parts, "GB")
