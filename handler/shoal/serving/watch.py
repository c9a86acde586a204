"""Looks at a running server again and again: for pictures of what it does, and to keep its batch limit in step.

Knows a server by its URL alone; limits are changed through its control file, where that is on this machine.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import RequestError, ShoalError
from shoal.serving.control import set_limits
from shoal.serving.schema import INFO_PATH
from shoal.tuning import LimitController

_LARGEST_ANSWER = 2**20
_PREDICT = "/predictions/"


@dataclass(frozen=True)
class Point:
    """What a server told at one moment; the figures of requests are those of its last seconds."""

    at: float  # seconds since the watch was made
    live: int
    waiting: int
    batch_limit: int
    requests: int  # answered in the window
    p50_s: float | None
    p95_s: float | None
    texts_per_s: float | None
    hit_rate: float | None
    cache_bytes: int


def info_url(url: str, name: str = "fish_speech") -> str:
    """Where a server tells about itself, from its address or from where requests go.

    Raises:
        RequestError: it is no http address.
    """
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is no address of a server: give one such as http://127.0.0.1:8080")
    if base.endswith(INFO_PATH):
        return base
    return f"{base}/1.0/{INFO_PATH}" if _PREDICT in base else f"{base}{_PREDICT}{name}/1.0/{INFO_PATH}"


def ask(url: str, token: str | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """What a server tells about itself.

    Raises:
        ShoalError: it does not answer, refuses, or is another kind of server; the message says which.
        RequestError: `url` is no http address.
    """
    where = info_url(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(where, headers=headers), timeout=timeout_s) as reply:
            told = json.loads(reply.read(_LARGEST_ANSWER))
    except urllib.error.HTTPError as error:
        hint = ": it wants a token (the key `inference` of its key file)" if error.code in (400, 401, 403) else ""
        raise ShoalError(f"the server at {where} answers {error.code}{hint}") from None
    except (OSError, ValueError) as error:
        raise ShoalError(f"no answer from {where}: {getattr(error, 'reason', error)}") from None
    if not isinstance(told, dict) or told.get("engine") != "shoal":
        raise ShoalError(f"what answers at {where} is no Shoal server")
    return told


class Watch:
    """Asks a server every so often, in a thread, and keeps the last answers. A server that is gone is asked again.

    Args:
        url: its address, or where requests go.
        token: its inference key, where it wants one.
        every_s: seconds between two questions.
        capacity: points that are kept; the oldest leave.
        on_point: called in the watch's thread with each new point.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        every_s: float = 1.0,
        capacity: int = 600,
        on_point: Callable[[Point], None] | None = None,
    ) -> None:
        info_url(url)  # a wrong one is told here, not in the thread
        self.url, self._token, self._every_s, self._on_point = url, token, max(0.05, every_s), on_point
        self.info: dict[str, Any] = {}  # the last answer
        self.error: str | None = None  # why there is no newer one
        self._points: deque[Point] = deque(maxlen=capacity)
        self._controller: LimitController | None = None
        self._control_file: Path | None = None
        self._begin, self._stop = time.monotonic(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def points(self) -> list[Point]:
        """What was told, in order."""
        with self._lock:
            return list(self._points)

    def follow(self, controller: LimitController | None, control_file: str | Path | None = None) -> None:
        """Have the batch limit follow the load, as `controller` decides, from now on; None: leave it alone again.

        Raises:
            RequestError: there is no control file to change it through.
        """
        if controller is not None and control_file is None:
            raise RequestError("limits change through the server's control file: name it (TorchServe.control_file)")
        with self._lock:
            self._controller, self._control_file = controller, Path(control_file) if control_file else None

    def look(self) -> Point:
        """Ask once, keep the answer, and move the limit if that is wanted. Raises what `ask` and `set_limits` raise."""
        told = ask(self.url, self._token)
        recent, cache = told["recent"], told["cache"]
        point = Point(
            time.monotonic() - self._begin,
            told["live"],
            told["waiting"],
            told["batch_limit"],
            recent["requests"],
            recent["p50_s"],
            recent["p95_s"],
            recent["texts_per_s"],
            recent["hit_rate"],
            cache["bytes"],
        )
        with self._lock:
            self.info, self.error = told, None
            self._points.append(point)
            controller, file = self._controller, self._control_file
        if controller is not None and point.p95_s is not None:
            wanted = controller.observe(point.p95_s, point.waiting, point.live)
            if wanted != point.batch_limit:
                set_limits(file, batch_limit=wanted)
        return point

    def start(self) -> Watch:
        """Look every `every_s` seconds until `stop`."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="shoal-watch", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Look no more; what was kept stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(15.0)
            self._thread = None

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                point = self.look()
                if self._on_point:
                    self._on_point(point)
            except ShoalError as error:
                self.error = str(error)
            self._stop.wait(self._every_s)
