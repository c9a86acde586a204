"""`ServerPanel`: start a real TorchServe, load it, change its limits while it runs, watch what that does, stop it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets

from shoal.archive import build_archive
from shoal.errors import RequestError, ShoalError
from shoal.monitoring import PerformanceTracker, percentile
from shoal.project import project_root, state_dir
from shoal.serving.background import note, own_folder, stop_orphans
from shoal.serving.control import set_limits
from shoal.serving.server import TorchServe
from shoal.tuning import LimitController
from shoal.ui.controls import Panel, number_slider, panel
from shoal.ui.jobs import Job, JobView
from shoal.ui.svg import line_chart
from shoal.ui.tables import html_table

_WINDOW_S = 1.0  # of one point in the pictures
_TIMEOUT_S = 120
_KEPT = 600  # points, of which the oldest leave


class ServerState(Job):
    """A server, the load on it, its live limits, and what clients see of it, window by window."""

    up = traitlets.Bool(False)
    clients = traitlets.Int(8, min=1, max=64)
    seconds = traitlets.Float(10.0, min=1.0)
    batch_limit = traitlets.Int(16, min=1, max=64)
    cache_mb = traitlets.Int(64, min=0)
    use_cache = traitlets.Bool(False)
    follow = traitlets.Bool(False)  # the batch limit follows the load
    p95_s = traitlets.Float(1.0, min=0.05)  # what 95% of requests should stay under then
    points = traitlets.List()  # (seconds, p50, p95, texts per second, live rows, limit)
    info = traitlets.Dict()

    def __init__(self, checkpoint: str | Path, texts: Sequence[str], **traits: Any) -> None:
        super().__init__(**traits)
        self.checkpoint, self.texts = Path(checkpoint), list(texts)
        self.server: TorchServe | None = None
        self.tracker = PerformanceTracker()
        self.sound: bytes | None = None  # the last reply
        self._place: Path | None = None  # of the archive, and of the note that lets the next kernel find an orphan
        self._begin = 0.0
        self._controller: LimitController | None = None
        self.observe(self._set_limits, ["batch_limit", "cache_mb"])
        self.observe(self._forget_controller, ["follow", "p95_s"])

    def start_server(self) -> None:
        """Build the archive and start TorchServe on free ports; what a killed kernel left running is stopped first."""
        if self.server is not None:
            return
        self.post(status="building the archive ...", progress=0.1)
        folder = state_dir() / "notebooks"
        stop_orphans(folder)
        self._place = Path(tempfile.mkdtemp(dir=own_folder(folder)))
        archive = build_archive(self._place, checkpoint=self.checkpoint)
        self.check()
        config = project_root() / "config.properties"
        server = TorchServe(archive, config=config if config.is_file() else None)
        server.start()
        try:
            note(server, self._place / "server.json")
            server.wait_ready(300, lambda seconds, what: self._wait(f"{what} ... {seconds:.0f} s"))
        except BaseException:
            server.stop()
            raise
        self.server, self._begin = server, time.monotonic()
        self._set_limits()
        self.post(up=True, info=self.ask(), status=f"ready at {server.predict_url}")

    def stop_server(self) -> None:
        """Stop TorchServe and remove the archive."""
        server, self.server = self.server, None
        if server is not None:
            self.post(status="stopping ...")
            server.stop()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
        self.post(up=False)

    def send_load(self) -> None:
        """Have `clients` send texts for `seconds`, each one after the other."""
        if self.server is None:
            raise RequestError("no server runs: press Start the server first")
        end = time.monotonic() + self.seconds
        stop, lock, window = threading.Event(), threading.Lock(), deque[tuple[float, float, dict[str, Any]]]()
        failed, first_error = itertools.count(1), ""
        failures = 0
        points = list(self.points)
        number = itertools.count()

        def client() -> None:
            nonlocal failures, first_error
            while not stop.is_set():
                begin = time.monotonic()
                try:
                    heard = self.say(self.texts[next(number) % len(self.texts)])
                except ShoalError as error:
                    failures, first_error = next(failed), first_error or str(error)
                    stop.wait(0.5)
                    continue
                now = time.monotonic()
                with lock:
                    window.append((now, now - begin, heard))
                self.tracker.add_latency_data(now - begin, **heard)

        threads = [threading.Thread(target=client, daemon=True) for _ in range(self.clients)]
        for thread in threads:
            thread.start()
        started = last = time.monotonic()
        try:
            while (now := time.monotonic()) < end and not self.cancel.is_set():
                self.cancel.wait(min(_WINDOW_S, max(0.05, end - now)))
                now = time.monotonic()
                with lock:
                    done = [window.popleft() for _ in range(len(window))]
                told = self.ask()
                if done:
                    latencies = sorted(seconds for _, seconds, _ in done)
                    p50, p95 = percentile(latencies, 0.5), percentile(latencies, 0.95)
                    rate = len(done) / (now - last)
                    self.tracker.add_throughput_data(len(done), now - last)
                    point = (now - self._begin, p50, p95, rate, told["live"], told["batch_limit"])
                    points = [*points, point][-_KEPT:]
                    self.post(points=points)
                    last = now
                    self._steer(p95, told)
                self.post(
                    info=told,
                    progress=min(1.0, (now - started) / self.seconds),
                    status=f"{len(points)} windows, {told['live']} rows live, {told['waiting']} wait",
                )
        finally:
            stop.set()
            for thread in threads:
                thread.join(_TIMEOUT_S)
        if failures:
            raise ShoalError(f"{failures} requests failed, such as: {first_error}")

    def say(self, text: str) -> dict[str, Any]:
        """One whole request; what its reply tells: audio seconds, cache hit, batch size.

        Raises:
            ShoalError: the server refused, or is not there.
        """
        import requests

        if self.server is None:
            raise ShoalError("no server runs")
        body = {"text": text, "use_memory_cache": "on" if self.use_cache else "off", "max_new_tokens": 400}
        try:
            reply = requests.post(self.server.predict_url, json=body, timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            raise ShoalError(f"no answer: {type(error).__name__}") from None
        if reply.status_code != 200:
            raise ShoalError(f"{reply.status_code}: {reply.text[:200]}")
        self.sound = reply.content
        told = reply.headers
        return {
            "audio_s": float(told["X-Shoal-Audio-Seconds"]),
            "cache_hit": told["X-Shoal-Cache"] == "hit",
            "batch_size": int(told["X-Shoal-Batch-Size"]),
        }

    def ask(self) -> dict[str, Any]:
        """What the server tells about itself."""
        import requests

        if self.server is None:
            return {}
        return requests.get(f"{self.server.predict_url}/1.0/v1/info", timeout=_TIMEOUT_S).json()

    def _wait(self, status: str) -> None:
        self.check()
        self.post(status=status, progress=0.5)

    def _steer(self, p95: float, told: dict[str, Any]) -> None:
        """Move the limit as the load of the last window wants it, if it is to follow."""
        if not self.follow:
            return
        if self._controller is None:
            most = min(16, told["max_batch_size"])
            limit = min(told["batch_limit"], most)
            self._controller = LimitController(limit, most=most, p95_s=self.p95_s)
        wanted = self._controller.observe(p95, told["waiting"], told["live"])
        if wanted != told["batch_limit"]:
            self.post(batch_limit=wanted)

    def _forget_controller(self, *_: Any) -> None:
        self._controller = None

    def _set_limits(self, *_: Any) -> None:
        if self.server is None:
            return
        try:
            set_limits(self.server.control_file, batch_limit=self.batch_limit, cache_bytes=self.cache_mb * 2**20)
        except ShoalError as error:
            self.post(error=str(error))


class ServerPanel(Panel):
    """Shows a ServerState.

    Args:
        checkpoint: directory that the archive points to.
        texts: what the clients say, in turn.
    """

    def __init__(self, checkpoint: str | Path, texts: Sequence[str], **traits: Any) -> None:
        self.state = state = ServerState(checkpoint, texts, **traits)
        actions = {
            "Start the server": state.start_server,
            "Send load": state.send_load,
            "Stop the server": state.stop_server,
        }
        self.job = JobView(state, actions)
        self.latency, self.throughput, self.table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.use_cache = widgets.Checkbox(description="answer repeats from the cache", indent=False)
        self.follow = widgets.Checkbox(description="the batch limit follows the load", indent=False)
        traitlets.link((state, "use_cache"), (self.use_cache, "value"))
        traitlets.link((state, "follow"), (self.follow, "value"))
        self.view = panel(
            "A running server",
            "실행 중인 서버",
            [
                number_slider(state, "clients", "clients", 1, 64),
                number_slider(state, "seconds", "seconds of load", 1.0, 120.0),
                number_slider(state, "batch_limit", "batch limit (live)", 1, 16),
                number_slider(state, "cache_mb", "cache in MB (live)", 0, 256),
                self.use_cache,
                self.follow,
                number_slider(state, "p95_s", "seconds for 95%", 0.05, 30.0, 0.05),
                self.job.view,
                self.latency,
                self.throughput,
                self.table,
            ],
        )
        state.observe(lambda _: self._draw(), "points")
        state.observe(lambda _: self._tell(), "info")

    def _draw(self) -> None:
        points = self.state.points
        if not points:
            self.latency.value = self.throughput.value = ""
            return
        at = [point[0] for point in points]
        lines = {"p50": [(t, p[1]) for t, p in zip(at, points, strict=True)]}
        lines["p95"] = [(t, p[2]) for t, p in zip(at, points, strict=True)]
        title = (
            f"Half of the last requests were answered within {points[-1][1]:.2f} s, 95% within {points[-1][2]:.2f} s"
        )
        self.latency.value = line_chart(title, lines, "seconds since the start", "seconds", markers=False)
        rows = {"texts per second": [(t, p[3]) for t, p in zip(at, points, strict=True)]}
        rows["live rows"] = [(t, float(p[4])) for t, p in zip(at, points, strict=True)]
        rows["batch limit"] = [(t, float(p[5])) for t, p in zip(at, points, strict=True)]
        title = f"{points[-1][3]:.1f} texts a second with at most {points[-1][5]} rows"
        self.throughput.value = line_chart(title, rows, "seconds since the start", "number", markers=False)

    def _tell(self) -> None:
        told = self.state.info
        if not told:
            return
        cache = told["cache"]
        rows = [
            ("checkpoint", told["checkpoint"]),
            ("rows live / limit", f"{told['live']} / {told['batch_limit']}"),
            ("sentences that wait", told["waiting"]),
            ("cache", f"{cache['entries']} entries, {cache['bytes']} of {cache['max_bytes']} bytes"),
            ("hit rate", f"{cache['hit_rate']:.0%}"),
        ]
        self.table.value = html_table(("the server", "says"), rows)

    def close(self) -> None:
        """Stop the server, whatever is under way."""
        self.state.cancel.set()
        with contextlib.suppress(ShoalError):
            self.state.stop_server()
