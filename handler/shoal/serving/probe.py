"""Asks a TorchServe how its workers are: over its APIs, and from the logs that it writes. Starts nothing."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What TorchServe writes to its logs when a worker ended before it was ready.
_WORKER_DIED = re.compile(r"Backend worker process died|Load model failed|Retry worker:")


def worker_states(management_url: str, name: str, token: str | None = None) -> list[str]:
    """States of a model's workers, such as READY or UNLOADING; empty where the server or the model is not there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with opener.open(
            urllib.request.Request(f"{management_url}/models/{name}", headers=headers), timeout=5
        ) as reply:
            versions = json.load(reply)
    except (urllib.error.URLError, OSError, ValueError):
        return []
    return [worker["status"] for version in versions for worker in version["workers"]]


def handler_says(predict_url: str, token: str | None, what: Callable[[dict[str, Any]], bool], timeout_s: float) -> bool:
    """Ask the handler how it is (`/v1/info`) until `what` holds of it; False if time was up or nobody listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    question = urllib.request.Request(f"{predict_url}/1.0/v1/info", headers=headers)
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            with opener.open(question, timeout=max(0.1, left)) as reply:
                if what(json.load(reply)):
                    return True
        except urllib.error.HTTPError as refused:  # its queue is full, or a worker is being started: ask again
            refused.close()
        except (OSError, ValueError):
            return False
        time.sleep(0.05)
    return False


def read_tokens(run_dir: Path) -> dict[str, str]:
    """The keys that TorchServe made at its start, by what they open ("inference", "management"); {} without tokens."""
    try:
        found = json.loads((run_dir / "key_file.json").read_text(encoding="utf-8"))
        return {kind: entry["key"] for kind, entry in found.items() if isinstance(entry, dict) and "key" in entry}
    except (OSError, ValueError):
        return {}


def worker_error(log_dir: Path) -> str:
    """What a worker's last traceback ends in, or its last line."""
    lines = [line.split(" - ", 1)[-1] for line in _read(log_dir / "model_log.log").splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback ")]
    if starts:
        for i in range(starts[-1] + 1, len(lines)):
            if lines[i] and not lines[i].startswith((" ", "\t")):
                return lines[i]
    return next((line for line in reversed(lines) if line.strip()), "it wrote no log")


def worker_died(log_dir: Path) -> bool:
    """Whether the logs tell of a worker that ended while it started."""
    return any(_WORKER_DIED.search(_read(log_dir / name)) for name in ("model_log.log", "ts_log.log"))


def last_words(log: Path) -> str:
    """The last line of a log that looks like an error, else its last line."""
    lines = [line for line in _read(log).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|exception|not found|already", line, re.IGNORECASE)]
    return (errors or lines or ["it said nothing"])[-1].strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
