"""Jobs that run beside the notebook: progress, cancel, errors in view. State (`Job`) apart from view (`JobView`).

The work runs in a thread of its own. What it reports is handed to the notebook's event loop, since output that a thread
writes by itself is lost, and at most twelve times a second, since each update is a message to the browser.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
import traitlets

from shoal.errors import CancelledError, ShoalError
from shoal.ui.controls import StatusLine

log = logging.getLogger(__name__)

UPDATES_PER_SECOND = 12


class Job(traitlets.HasTraits):
    """What a panel knows of its work: one job at a time. Panels add traits of their own for what it finds."""

    running = traitlets.Bool(False)
    progress = traitlets.Float(0.0)  # 0 to 1
    status = traitlets.Unicode("ready")  # "ready", what runs now, then "done", "cancelled" or "failed"
    error = traitlets.Unicode("")

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = _running_loop()
        self._lock = threading.RLock()  # whoever observes `running` may post
        self._pending: dict[str, Any] = {}
        self._armed = False
        self._flushed = 0.0  # time.monotonic()

    def start(self, work: Callable[[], None]) -> bool:
        """Begin work in a thread; False, and no effect, while other work runs.

        The work looks at `cancel` now and then, reports with `post`, and may raise: that is shown, not lost.
        """
        with self._lock:
            if self.running:
                return False
            self.running = True
        self.cancel.clear()
        self.set_trait("progress", 0.0)
        self.set_trait("error", "")
        self.set_trait("status", "running ...")
        self._thread = threading.Thread(target=self._run, args=(work,), name="shoal-job", daemon=True)
        self._thread.start()
        return True

    async def wait(self) -> None:
        """Wait for the work in a cell without blocking the notebook, so that Cancel works meanwhile."""
        while self.running:
            await asyncio.sleep(0.02)

    def post(self, **traits: Any) -> None:
        """Set traits from any thread; of several values that come close together the last one counts."""
        with self._lock:
            self._pending.update(traits)
            if self._armed:
                return
            self._armed = True
        self._on_loop(self._arm)

    def check(self) -> None:
        """Raise CancelledError once Cancel was pressed."""
        if self.cancel.is_set():
            raise CancelledError("cancelled")

    def _run(self, work: Callable[[], None]) -> None:
        end: dict[str, Any] = {"progress": 1.0}
        try:
            work()
            end["status"] = "cancelled" if self.cancel.is_set() else "done"
        except CancelledError:
            end["status"] = "cancelled"
        except Exception as error:  # whatever it was, the person who pressed the button should see it
            log.debug("a job failed", exc_info=True)
            name = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
            end |= {"status": "failed", "error": f"{name}{error}"}
        if end["status"] != "done":
            del end["progress"]
        self.post(**end)
        self._on_loop(self._finish)

    def _finish(self) -> None:
        self._flush()
        self.running = False

    def _arm(self) -> None:
        due = self._flushed + 1 / UPDATES_PER_SECOND - time.monotonic()
        if due <= 0 or self._loop is None:
            self._flush()
        else:
            self._loop.call_later(due, self._flush)

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending, self._armed = self._pending, {}, False
        self._flushed = time.monotonic()
        with self.hold_trait_notifications():
            for name, value in pending.items():
                self.set_trait(name, value)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None or self._loop.is_closed():
            call()
        else:
            self._loop.call_soon_threadsafe(call)


class JobView:
    """A row of buttons, a progress bar, a status line and a place for errors.

    Args:
        actions: what each run button says -> what it does, in a thread.
    """

    def __init__(self, job: Job, actions: Mapping[str, Callable[[], None]]) -> None:
        self.job = job
        self.run_buttons = {
            name: widgets.Button(description=name, button_style="primary", tooltip=name, layout={"width": "auto"})
            for name in actions
        }
        self.run_button = next(iter(self.run_buttons.values()))
        for name, button in self.run_buttons.items():
            button.on_click(lambda _, work=actions[name]: job.start(work))
        self.cancel_button = widgets.Button(description="Cancel", disabled=True, tooltip="Stop after the current step")
        self.cancel_button.on_click(lambda _: job.cancel.set())
        self.bar = widgets.FloatProgress(min=0.0, max=1.0, layout={"width": "180px"})
        self.status, self.error = StatusLine(), StatusLine(alert=True)
        self.view = widgets.VBox(
            [
                widgets.HBox(
                    [*self.run_buttons.values(), self.cancel_button, self.bar, self.status],
                    layout={"flex_flow": "row wrap", "align_items": "center"},
                ),
                self.error,
            ]
        )
        job.observe(lambda _: self._show(), ["running", "progress", "status", "error"])
        self._show()

    def _show(self) -> None:
        job = self.job
        for button in self.run_buttons.values():
            button.disabled = job.running
        self.cancel_button.disabled = not job.running
        self.bar.value, self.status.value, self.error.value = job.progress, job.status, job.error


class JobButton:
    """One button for one job that ends in HTML, for notebooks that need no panel.

    Args:
        description: what the button says.
        work: called in a thread as work(report, cancelled): `report(text)` shows a line, `cancelled()` says whether to
            stop; returns HTML to show.
    """

    def __init__(self, description: str, work: Callable[[Callable[[str], None], Callable[[], bool]], str]) -> None:
        self.job = _HtmlJob()
        self._work = work
        self._buttons = JobView(self.job, {description: self._do})
        self.run_button, self.cancel_button = self._buttons.run_button, self._buttons.cancel_button
        self.status = self._buttons.status
        self.result = widgets.HTML()
        self.job.observe(lambda change: setattr(self.result, "value", change.new), "html")
        self.view = widgets.VBox([self._buttons.view, self.result])

    def start(self) -> None:
        """Begin the job; no effect while it runs."""
        self.job.start(self._do)

    async def wait(self) -> None:
        """Wait for the job in a cell without blocking the notebook, so that Cancel works meanwhile."""
        await self.job.wait()

    def _do(self) -> None:
        html = self._work(lambda text: self.job.post(status=text), self.job.cancel.is_set)
        if html:
            self.job.post(html=html)


class _HtmlJob(Job):
    html = traitlets.Unicode("")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
