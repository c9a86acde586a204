"""Decoding in a thread of its own, so that it goes on while a server's process is busy between two calls.

Knows something that can be stepped and whether that is idle; knows nothing of requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class Stepper:
    """Steps, again and again, except while its owner holds it: whoever holds it may touch what a step touches.

    It is held at first, and not let go before `release`.

    Args:
        step: does one step, and tells whether there is something that the owner should not wait to hear.
        idle: whether there is nothing to do.
    """

    def __init__(self, step: Callable[[], bool], idle: Callable[[], bool]) -> None:
        self._step, self._idle = step, idle
        self._changed = threading.Condition()
        self._held, self._stepping, self._news = True, False, False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def release(self) -> None:
        """Let it step until it is held again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal-step", daemon=True)
            self._thread.start()
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def hold(self) -> None:
        """Have it stop, waiting for the step under way to end. Raises what a step has raised."""
        with self._changed:
            self._held = True
            while self._stepping:
                self._changed.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, seconds: float, at_least: float = 0.0) -> None:
        """Let it step, and return after so many seconds; before that when it is idle or failed, or has news.

        at_least: seconds that news wait for more news.
        """
        begin = time.monotonic()
        with self._changed:
            while True:
                spent = time.monotonic() - begin
                if self._error or spent >= seconds or (not self._stepping and self._idle()):
                    break
                if self._news and spent >= at_least:
                    break
                self._changed.wait((at_least if self._news else seconds) - spent)
            self._news = False

    def _run(self) -> None:
        torch.get_num_threads()  # has the thread take the process's number of threads before its first computation
        while True:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
                while self._held or self._error or self._idle():
                    self._changed.wait()
                self._stepping = True
            news, error = False, None
            try:
                news = self._step()
            except Exception as caught:
                error = caught
            with self._changed:
                self._news, self._error = self._news or news, error
