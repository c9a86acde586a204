"""What `shoal serve` does: build the archive, start the server, say how to talk to it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from shoal.archive import build_archive
from shoal.project import ensure_checkpoint, model_store, project_root, state_dir
from shoal.serving.background import detach, running
from shoal.serving.processes import signals_as_exit
from shoal.serving.server import Ports, TorchServe

GREETING = "안녕하세요, 반갑습니다."


def serve(checkpoint: Path | None, *, background: bool, timeout_s: float) -> None:
    """Serve until Ctrl-C, or with `background` return once the server is ready and leave it running."""
    state_file = state_dir() / "server.json"
    left = running(state_file)
    if left:
        print("a server is running already; stop it with: make stop (or shoal stop). Try:\n")
        print(f"    {curl_line(left.predict_url)}\n")
        return
    archive = build_archive(model_store(), checkpoint=ensure_checkpoint(checkpoint))
    log_dir = state_dir() / "logs" / "serve"
    with (
        signals_as_exit(),
        TorchServe(archive, config=config_file(), ports=usual_or_free_ports(), log_dir=log_dir) as server,
    ):
        wait_with_progress(server, timeout_s)
        print(f"ready at {server.predict_url}, metrics at {server.metrics_url}, logs in {log_dir}. Try:\n")
        print(f"    {curl_line(server.predict_url)}\n", flush=True)
        if background:
            detach(server, state_file)
            print("stop it with: make stop (or shoal stop)")
        else:
            print("stop it with: Ctrl-C", flush=True)
            server.wait()


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
