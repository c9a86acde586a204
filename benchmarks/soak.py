"""A real TorchServe for a long time under mixed requests: nothing may grow, nothing may get lost.

    python -m benchmarks.soak --seconds 1200

Clients send, in a mix drawn from a seed: valid requests (whole, streamed, repeated, with a voice of their own), wrong
ones (empty text, values out of range, broken JSON, a reference that is no audio) and ones that hang up in the middle
of a stream. Every answer is checked against what was sent. Every few seconds the server's processes are looked at:
resident memory, threads, open files, live rows. After a warm-up (a quarter of the time) the memory of the worker
may grow by 2% (`--growth`), and at the end nothing may be live or left open. Ends in one JSON line; exit status 1 if a
promise was broken.
"""

from __future__ import annotations

import base64
import io
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import psutil
import requests
import soundfile
import typer
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.serving.server import TorchServe

from benchmarks import common
from benchmarks.texts import workloads

_TIMEOUT_S = 120
_MIX = {"whole": 8, "repeated": 6, "streamed": 4, "voice": 1, "wrong": 3, "hang-up": 3}
_WRONG: tuple[Any, ...] = (
    {"text": ""},
    {"text": "x", "temperature": 99},
    {"text": "x", "reference_id": "nobody"},
    {"text": "x", "references": [{"audio": base64.b64encode(b"RIFF no audio").decode(), "text": "x"}]},
    {"text": 5},
    b"{broken",
)


class Soak:
    """Clients, their mix, and what they have seen."""

    def __init__(self, server: TorchServe, texts: list[str], clients: int, seed: int) -> None:
        self._server, self._texts, self._clients, self._seed = server, texts, clients, seed
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._reference = _reference()

    def run(self, seconds: float, watch_every_s: float) -> list[dict[str, Any]]:
        """Send for so long; returns what was seen of the server meanwhile."""
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self._clients)]
        for thread in threads:
            thread.start()
        seen, begin = [], time.monotonic()
        while (now := time.monotonic() - begin) < seconds:
            seen.append({"at": round(now, 1), **look_at(self._server)})
            time.sleep(min(watch_every_s, max(0.1, seconds - now)))
        self._end.set()
        for thread in threads:
            thread.join()
        return seen

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        kinds, weights = zip(*_MIX.items(), strict=True)
        with requests.Session() as session:
            while not self._end.is_set():
                (kind,) = rng.choices(kinds, weights)
                try:
                    surprise = self._send(session, kind, rng)
                except requests.RequestException as error:
                    surprise = f"{type(error).__name__}: {error}"
                with self._lock:
                    self.done[kind] += 1
                    if surprise:
                        self.surprises.append(f"{kind}: {surprise}"[:300])

    def _send(self, session: requests.Session, kind: str, rng: random.Random) -> str | None:
        """Send one request; what was not as it should be, or None."""
        if kind == "wrong":
            body = rng.choice(_WRONG)
            given = {"data": body, "headers": {"Content-Type": "application/json"}} if isinstance(body, bytes) else {}
            reply = session.post(self._server.predict_url, timeout=_TIMEOUT_S, **(given or {"json": body}))
            return None if reply.status_code == 400 else f"{reply.status_code} for {body!r}"
        body: dict[str, Any] = {"text": rng.choice(self._texts), "max_new_tokens": 200}
        if kind == "repeated":
            body |= {"text": self._texts[rng.randrange(4)], "seed": 1}
        elif kind == "voice":
            body["references"] = [{"audio": self._reference, "text": "Some words."}]
        stream = kind in ("streamed", "hang-up")
        body["streaming"] = stream
        with session.post(self._server.predict_url, json=body, timeout=_TIMEOUT_S, stream=stream) as reply:
            if reply.status_code == 503:
                time.sleep(0.5)
                return None
            if reply.status_code != 200:
                return f"{reply.status_code} {reply.text[:200]}"
            if kind == "hang-up":
                next(reply.iter_content(1024), None)
                return None  # leaving the block closes the connection
            content = reply.content
        if not content.startswith(b"RIFF") or len(content) < 1000:
            return f"{len(content)} bytes that are no sound"
        return None


def look_at(server: TorchServe) -> dict[str, Any]:
    """Memory, threads and files of the model's worker, the same of the front end, and live rows."""
    worker, front = _processes(server)
    told = requests.get(server.predict_url + "/1.0/v1/info", timeout=_TIMEOUT_S).json()
    return {
        "worker_mb": round(worker.memory_info().rss / 1e6, 1),
        "front_mb": round(front.memory_info().rss / 1e6, 1),
        "worker_threads": worker.num_threads(),
        "worker_files": worker.num_fds(),
        "front_threads": front.num_threads(),
        "front_files": front.num_fds(),
        "live": told["live"],
        "waiting": told["waiting"],
    }


def _processes(server: TorchServe) -> tuple[psutil.Process, psutil.Process]:
    found = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
    worker = next(p for p in found if "model_service_worker" in " ".join(p.cmdline()))
    front = next(p for p in found if p.name() == "java")
    return worker, front


def _reference() -> str:
    noise = np.random.default_rng(0).standard_normal(32000).astype(np.float32) * 0.05
    file = io.BytesIO()
    soundfile.write(file, noise, 16000, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def judge(seen: list[dict[str, Any]], after: dict[str, Any], surprises: list[str], growth: float) -> list[str]:
    """The promises that were broken."""
    broken = [f"{len(surprises)} surprising answers, such as: {surprises[0]}"] if surprises else []
    warm = seen[len(seen) // 4 :]
    third = max(1, len(warm) // 3)
    first, last = (statistics.median(s["worker_mb"] for s in part) for part in (warm[:third], warm[-third:]))
    if last > first * (1 + growth):
        broken.append(f"the worker grew from {first:.0f} to {last:.0f} MB after its warm-up")
    if after["live"] or after["waiting"]:
        broken.append(f"{after['live']} rows are live and {after['waiting']} sentences wait when nobody asks")
    for what in ("worker_threads", "worker_files"):
        if after[what] > max(s[what] for s in warm[:third]):
            broken.append(f"{what} grew from {max(s[what] for s in warm[:third])} to {after[what]}")
    return broken


def main(
    checkpoint: Annotated[str, typer.Option(help="a directory, or smoke")] = "model_store/demo",
    seconds: float = 1200.0,
    clients: int = 16,
    watch: Annotated[float, typer.Option(help="seconds between two looks at the processes")] = 5.0,
    growth: Annotated[float, typer.Option(help="share that the worker's memory may grow by after the warm-up")] = 0.02,
    seed: int = 0,
) -> None:
    """Run it; see the module's text."""
    directory = common.checkpoint_of("smoke") if checkpoint == "smoke" else Path(checkpoint)
    texts = workloads(directory, 100)["100 texts"]
    with TemporaryDirectory() as store:
        archive = build_archive(store, checkpoint=directory)
        with TorchServe(archive, config=project_root() / "config.properties") as server:
            server.wait_ready()
            soak = Soak(server, texts, clients, seed)
            seen = soak.run(seconds, watch)
            time.sleep(3.0)  # those who hung up are noticed within a slice
            after = look_at(server)
    broken = judge(seen, after, soak.surprises, growth)
    print(f"{sum(soak.done.values())} requests in {seconds:.0f} s: {dict(soak.done)}")
    marks = [seen[i] for i in sorted({0, len(seen) // 4, len(seen) // 2, len(seen) - 1})] + [{"at": "after", **after}]
    print(common.table(after | {"at": ""}, [[m[k] for k in after | {"at": ""}] for m in marks]))
    for line in broken:
        print("broken:", line)
    content = {"checkpoint": directory.name, "seconds": seconds, "clients": clients, "requests": dict(soak.done)}
    print(common.closing_line("soak", **content, broken=broken, looks=marks))
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
