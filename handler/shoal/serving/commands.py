"""What `shoal serve` and `shoal warm` do: build the archive and start the server, fill a server's caches."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.archive import build_archive
from shoal.errors import DependencyError, ShoalError
from shoal.project import ensure_checkpoint, handler_dir, model_store, project_root, state_dir
from shoal.serving.background import detach, running
from shoal.serving.limits import HandlerSettings, load_settings
from shoal.serving.processes import signals_as_exit
from shoal.serving.server import Ports, TorchServe

_DRAIN_S = 60.0  # that requests have to end after SIGTERM
_MOST_RESTARTS = 5  # in a row, each within the quiet time after the one before
_QUIET_S = 300.0
GREETING = "안녕하세요, 반갑습니다."


def serve(checkpoint: Path | None, *, background: bool, timeout_s: float) -> None:
    """Serve until Ctrl-C, or with `background` return once the server is ready and leave it running.

    In the foreground a server that ends by itself is started again, later each time; SIGTERM drains it first.
    """
    state_file = state_dir() / "server.json"
    left = running(state_file)
    if left:
        print("a server is running already; stop it with: make stop (or shoal stop). Try:\n")
        print(f"    {curl_line(left.predict_url)}\n")
        return
    archive = build_archive(model_store(), checkpoint=ensure_checkpoint(checkpoint))
    log_dir, ports, delays = state_dir() / "logs" / "serve", usual_or_free_ports(), _RestartDelays()
    with signals_as_exit():
        while True:
            with TorchServe(archive, config=config_file(), ports=ports, log_dir=log_dir) as server:
                wait_with_progress(server, timeout_s)
                print(f"ready at {server.predict_url}, metrics at {server.metrics_url}, logs in {log_dir}. Try:\n")
                print(f"    {curl_line(server.predict_url)}\n", flush=True)
                if background:
                    detach(server, state_file)
                    print("stop it with: make stop (or shoal stop)")
                    return
                print("stop it with: Ctrl-C; SIGTERM finishes the requests that are there first", flush=True)
                status = _wait_or_drain(server)
            delay = delays.next()
            if delay is None:
                raise ShoalError(f"TorchServe ended again and again, at last with {status}: see the logs in {log_dir}")
            print(f"TorchServe ended with {status}: it is started again in {delay:.0f} s", flush=True)
            time.sleep(delay)


def _wait_or_drain(server: TorchServe) -> int:
    """Wait until the server ends by itself; on SIGTERM let it finish what it has, then pass the exit on."""
    try:
        return server.wait()
    except SystemExit:
        deadline = time.monotonic() + _DRAIN_S
        if server.stop_taking(_DRAIN_S):
            print(f"no new requests; up to {_DRAIN_S:.0f} s for those that are there ...", flush=True)
        done = server.drain(deadline - time.monotonic())
        print("all done" if done else "time is up, or it no longer answers: what is left is dropped", flush=True)
        raise


class _RestartDelays:
    """Seconds before each new start after a failure: 1, 2, 4, 8, 16, then none; after a quiet time from 1 again."""

    def __init__(self) -> None:
        self._count, self._last = 0, time.monotonic()

    def next(self) -> float | None:
        now = time.monotonic()
        if now - self._last > _QUIET_S:
            self._count = 0
        self._last = now
        self._count += 1
        return float(2 ** (self._count - 1)) if self._count <= _MOST_RESTARTS else None


def warm(
    phrases: Path, checkpoint: Path, *, disk: Path | None, redis: str | None, voices: Sequence[str | None]
) -> bool:
    """Decode a file's phrases into the tiers that a server reads; False where some could not be spoken."""
    from shoal.serving.caches import open_cache, read_phrases
    from shoal.serving.service import SpeechService
    from shoal.speech import FishSpeech

    texts = read_phrases(phrases)
    settings = _server_settings()
    changes = {"cache_disk": str(disk.expanduser().absolute()) if disk else None, "cache_redis": redis}
    settings = settings.model_copy(update={key: value for key, value in changes.items() if value})
    cache = open_cache(settings)
    if not cache.tiers:
        raise ShoalError("no cache to warm: name --disk DIR or --redis URL, or set one in handler/model-config.yaml")
    model = FishSpeech.load(
        checkpoint,
        device=settings.device,
        dtype=settings.dtype,
        max_batch_size=settings.max_batch_size,
        threads=settings.threads,
        cache=cache,
    )
    terminal = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        if terminal:
            sys.stderr.write(f"\r\033[K{done} of {total}")
            sys.stderr.flush()

    done = SpeechService(model, settings).warm(texts, voices, show)
    if terminal:
        sys.stderr.write("\r\033[K")
    names = " and ".join(tier.name for tier in cache.tiers)
    print(f"{done.decoded} phrases decoded into {names}, {done.known} known already, {len(done.failed)} failed")
    for text, error in done.failed.items():
        print(f"  {text[:60]!r}: {error}")
    return not done.failed


def _server_settings() -> HandlerSettings:
    """What the server's model-config.yaml says: its precision and limits are part of what its requests ask for."""
    try:
        import yaml
    except ImportError:
        raise DependencyError("reading model-config.yaml needs PyYAML: pip install PyYAML") from None
    config = yaml.safe_load((handler_dir() / "model-config.yaml").read_text(encoding="utf-8")) or {}
    return load_settings(config.get("handler"))


def config_file() -> Path | None:
    """The project's config.properties; None where there is no project, and TorchServe's defaults hold."""
    path = project_root() / "config.properties"
    return path if path.is_file() else None


def usual_or_free_ports() -> Ports:
    """TorchServe's usual ports, or free ones where another program has one of them."""
    usual = Ports()
    taken = usual.taken()
    if not taken:
        return usual
    print(f"port {', '.join(map(str, taken))} is taken by another program: using free ports instead")
    return Ports.free()


def curl_line(url: str, output: str = "hello.wav") -> str:
    """A command for a shell that says something and keeps the sound."""
    body = json.dumps({"text": GREETING}, ensure_ascii=False)
    return f"curl -sS --fail {url} -H 'Content-Type: application/json' -d {shlex.quote(body)} -o {output}"


def wait_with_progress(server: TorchServe, timeout_s: float) -> None:
    """Wait until the server is ready: a line that counts on a terminal, one line per change of state elsewhere."""
    terminal = sys.stderr.isatty()
    said = ""

    def show(seconds: float, state: str) -> None:
        nonlocal said
        if terminal:
            sys.stderr.write(f"\r\033[K{state} ... {seconds:.0f} s")
            sys.stderr.flush()
        elif state != said:
            print(f"{state} ...", flush=True)
        said = state

    try:
        server.wait_ready(timeout_s, show)
    finally:
        if terminal:
            sys.stderr.write("\r\033[K")
