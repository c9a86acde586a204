"""Ends a process group for good, and keeps Ctrl-C from interrupting that. Knows nothing of what the processes do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the block is done, then deliver the first that came.

    Outside the main thread, where Python delivers no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before: dict[int, Any] = {number: signal.signal(number, lambda n, _frame: arrived.append(n)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if arrived:
            os.kill(os.getpid(), arrived[0])


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit in the block, so that context managers clean up as they do on Ctrl-C."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def group_members(group: int) -> list[int]:
    """Process ids of a process group that still run; zombies do not count."""
    import psutil

    members = []
    for process in psutil.process_iter(["pid", "status"]):
        pid = process.info["pid"]
        try:
            if os.getpgid(pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def end_group(group: int, first: int | None = None, grace_s: float = 10.0) -> None:
    """End every process of a group: SIGTERM to `first` (else to all), SIGKILL for what is left after the grace time."""
    if not group_members(group):
        return
    _send(first if first is not None else -group, signal.SIGTERM)
    if not _wait_until_gone(group, grace_s):
        _send(-group, signal.SIGKILL)
        _wait_until_gone(group, 5.0)


def _send(target: int, number: int) -> None:
    """Signal a process, or a group where the target is negative; one that is gone already is fine."""
    try:
        if target < 0:
            os.killpg(-target, number)
        else:
            os.kill(target, number)
    except ProcessLookupError:
        pass


def _wait_until_gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
