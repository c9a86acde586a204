"""A button that runs a job without blocking the notebook: progress, cancel, errors in view.

The job runs in a thread of its own; what it reports is handed to the notebook's event loop, since output that a thread
writes by itself is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets


class JobButton:
    """Run and cancel buttons with a status line and a place for the result.

    Args:
        description: what the button says.
        work: called in a thread as work(report, cancelled): `report(text)` shows a line, `cancelled()` says whether to
            stop; returns HTML to show. Exceptions are shown, not lost.
    """

    def __init__(self, description: str, work: Callable[[Callable[[str], None], Callable[[], bool]], str]) -> None:
        self._work = work
        self.run_button = widgets.Button(description=description, button_style="primary", tooltip=description)
        self.cancel_button = widgets.Button(description="Cancel", disabled=True, tooltip="Stop after the current step")
        self.status = widgets.Label(value="ready")
        self.result = widgets.HTML()
        self.view = widgets.VBox(
            [widgets.HBox([self.run_button, self.cancel_button, self.status]), self.result],
        )
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = _running_loop()
        self.run_button.on_click(lambda _: self.start())
        self.cancel_button.on_click(lambda _: self._cancel.set())

    def start(self) -> None:
        """Begin the job; no effect while it runs."""
        if self._thread and self._thread.is_alive():
            return
        self._cancel.clear()
        self._set(run_button={"disabled": True}, cancel_button={"disabled": False}, status={"value": "running ..."})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def wait(self) -> None:
        """Wait for the job in a cell without blocking the notebook, so that Cancel works meanwhile."""
        while self._thread and self._thread.is_alive():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # the last update is on its way

    def _run(self) -> None:
        try:
            html = self._work(lambda text: self._set(status={"value": text}), self._cancel.is_set)
            state = "cancelled" if self._cancel.is_set() else "done"
            self._set(result={"value": html or self.result.value}, status={"value": state})
        except Exception as error:  # whatever it was, the person who pressed the button should see it
            self._set(status={"value": f"failed: {type(error).__name__}: {error}"})
        finally:
            self._set(run_button={"disabled": False}, cancel_button={"disabled": True})

    def _set(self, **changes: dict[str, Any]) -> None:
        def apply() -> None:
            for name, traits in changes.items():
                for trait, value in traits.items():
                    setattr(getattr(self, name), trait, value)

        if self._loop is None or threading.current_thread() is threading.main_thread():
            apply()
        else:
            self._loop.call_soon_threadsafe(apply)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
