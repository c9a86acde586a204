"""A real TorchServe under concurrent clients, and how much of the engine's own throughput arrives over REST.

    python -m benchmarks.serving --checkpoint model_store/demo --clients 1,4,16,64

Closed loop: each client sends its next request when its last is answered. Open loop (`--rates`, requests a second):
requests come by a Poisson process whether or not others are done; those that are refused (503) are counted. Caches are
off, so that every request decodes. The engine alone speaks the same texts in this process, in turns with the closed
loops, and the ratio is of seconds of sound per second. Time to first audio is of streamed requests, the same number of
clients. What a lone request waits for company is its whole time less the engine's own for the same text.
Ends in one JSON line.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import requests
import typer
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.sampling import SamplingParams
from shoal.serving.server import TorchServe
from shoal.speech import FishSpeech

from benchmarks import common
from benchmarks.texts import workloads

_TIMEOUT_S = 300


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request."""

    status: int
    seconds: float
    first_s: float  # until the first byte of sound
    audio_seconds: float
    batch_size: int


def main(
    checkpoint: Annotated[str, typer.Option(help="a directory, or smoke, mid, real")] = "model_store/demo",
    clients: Annotated[str, typer.Option(help="concurrent clients, by commas")] = "1,4,16,64",
    rates: Annotated[str, typer.Option(help="requests a second of the open loop, by commas; empty: none")] = "2,8",
    count: Annotated[int, typer.Option(help="requests per client number, at least two each")] = 64,
    rounds: int = 3,
    batch: Annotated[int, typer.Option(help="rows that decode at a time, in the server and alone")] = 16,
    slice_ms: Annotated[float, typer.Option(help="how long one call of the handler decodes")] = 50.0,
    device: str = "auto",
) -> None:
    """Measure; see the module's text."""
    directory = common.checkpoint_of(checkpoint) if checkpoint in ("smoke", "mid", "real") else Path(checkpoint)
    texts = workloads(directory, 100)["100 texts"]
    alone = FishSpeech.load(directory, device=device, max_batch_size=batch)
    with TemporaryDirectory() as store:
        settings = {"max_batch_size": batch, "device": device, "slice_ms": slice_ms, "limits": {"max_waiting": 128}}
        archive = build_archive(store, checkpoint=directory, overrides={"handler": settings, "batchSize": 256})
        with TorchServe(archive, config=project_root() / "config.properties") as server:
            server.wait_ready()
            rows, lone = closed_loops(server, alone, texts, [int(n) for n in clients.split(",")], count, rounds)
            print(common.table(rows[0], [row.values() for row in rows]))
            print(f"a lone request takes {lone:.1f} ms more than the engine alone (median)")
            opened = [open_loop(server, texts, float(rate), count) for rate in filter(None, rates.split(","))]
            if opened:
                print(common.table(opened[0], [row.values() for row in opened]))
    content = {"checkpoint": directory.name, "batch": batch, "count": count, "rounds": rounds, "slice_ms": slice_ms}
    print(common.closing_line("serving", **content, rows=rows, lone_extra_ms=round(lone, 1), open_loop=opened))


def closed_loops(
    server: TorchServe, alone: FishSpeech, texts: Sequence[str], sizes: Sequence[int], count: int, rounds: int
) -> tuple[list[dict[str, Any]], float]:
    """The table of the closed loops, and the milliseconds that a lone request takes more than the engine alone."""
    speak(alone, texts[:4], 4, seed=0)
    ask_all(server, texts[:16], 16, seed=0)
    answers: dict[int, list[list[Answer]]] = {size: [] for size in sizes}
    walls: dict[int, list[float]] = {size: [] for size in sizes}
    streamed: dict[int, list[Answer]] = {size: [] for size in sizes}
    engine: dict[int, list[float]] = {size: [] for size in sizes}  # seconds of sound per second
    for round_ in range(rounds):
        for size in sizes:
            chosen = [texts[(round_ * 31 + i) % len(texts)] for i in range(max(count if size > 1 else 8, 2 * size))]
            engine[size].append(speak(alone, chosen, size, seed=round_))
            wall, found = ask_all(server, chosen, size, seed=round_)
            answers[size].append(found)
            walls[size].append(wall)
            streamed[size] += ask_all(server, chosen[: max(4, size)], size, seed=round_ + 1000, stream=True)[1]
    extra = []
    for i, text in enumerate(texts[:12]):
        begin = time.perf_counter()
        alone.synthesize(text, params=SamplingParams(seed=i), use_cache=False)
        own = time.perf_counter() - begin
        extra.append(1000 * (ask(server, text, i).seconds - own))
    rows = []
    for size in sizes:
        speeds = [
            sum(a.audio_seconds for a in found) / wall for found, wall in zip(answers[size], walls[size], strict=True)
        ]
        every = [a for found in answers[size] for a in found]
        times = [a.seconds for a in every]
        ratios = [s / e for s, e in zip(speeds, engine[size], strict=True)]
        rows.append(
            {
                "clients": size,
                "requests": len(every),
                "failed": sum(a.status != 200 for a in every),
                "texts_per_s": round(len(every) / sum(walls[size]), 2),
                "audio_s_per_s": round(statistics.median(speeds), 2),
                "engine_ratio": round(statistics.median(ratios), 3),
                **percentiles(times),
                "first_audio_p50": round(statistics.median(a.first_s for a in streamed[size]), 3),
                "first_audio_p95": quantile([a.first_s for a in streamed[size]], 0.95),
                "mean_batch": round(statistics.mean(a.batch_size for a in every), 1),
            }
        )
    return rows, statistics.median(extra)


def open_loop(server: TorchServe, texts: Sequence[str], rate: float, count: int) -> dict[str, Any]:
    """Requests by a Poisson process of `rate` a second."""
    rng, found, threads = random.Random(1), [], []
    begin = time.perf_counter()

    def send(i: int) -> None:
        found.append(ask(server, texts[i % len(texts)], i))

    due = begin
    for i in range(count):
        due += rng.expovariate(rate)
        time.sleep(max(0.0, due - time.perf_counter()))
        threads.append(threading.Thread(target=send, args=(i,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    ok = [a for a in found if a.status == 200]
    return {
        "rate": rate,
        "requests": count,
        "refused": sum(a.status == 503 for a in found),
        "failed": sum(a.status not in (200, 503) for a in found),
        "texts_per_s": round(len(ok) / (time.perf_counter() - begin), 2),
        **percentiles([a.seconds for a in ok]),
        "mean_batch": round(statistics.mean(a.batch_size for a in ok), 1),
    }


def speak(model: FishSpeech, texts: Sequence[str], rows: int, seed: int) -> float:
    """Seconds of sound per second of the engine alone, `rows` texts at a time."""
    model.scheduler.batch_limit = rows
    begin = time.perf_counter()
    params = [SamplingParams(seed=seed + i) for i in range(len(texts))]
    out = model.generate_batch(texts, params=params, use_cache=False)
    return sum(speech.seconds for speech in out) / (time.perf_counter() - begin)


def ask_all(
    server: TorchServe, texts: Sequence[str], clients: int, seed: int, stream: bool = False
) -> tuple[float, list[Answer]]:
    """Wall-clock seconds, and the answers to all texts from so many clients at a time."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda item: ask(server, item[1], seed + item[0], stream), enumerate(texts)))
    return time.perf_counter() - begin, found


def ask(server: TorchServe, text: str, seed: int, stream: bool = False) -> Answer:
    """One request, as a client would send it."""
    body = {"text": text, "seed": seed, "use_memory_cache": "off", "streaming": stream, "max_new_tokens": 1024}
    begin = time.perf_counter()
    with requests.post(server.predict_url, json=body, timeout=_TIMEOUT_S, stream=True) as reply:
        chunks = reply.iter_content(None)
        size = len(next(chunks, b""))
        first = time.perf_counter() - begin
        size += sum(map(len, chunks))
        headers = reply.headers
    audio = float(headers.get("X-Shoal-Audio-Seconds", 0))
    return Answer(
        reply.status_code, time.perf_counter() - begin, first, audio, int(headers.get("X-Shoal-Batch-Size", 0))
    )


def percentiles(times: list[float]) -> dict[str, float]:
    return {f"p{p}": quantile(times, p / 100) for p in (50, 95, 99)}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


if __name__ == "__main__":
    typer.run(main)
