"""`shoal doctor`: looks at what a machine must have and says what to do about what it lacks. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError

MINIMUM_FREE_GB = 3.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: str  # "ok" | "warn" | "fail"
    what: str
    detail: str
    remedy: str = ""


def examine(checkpoint: str | Path | None = None) -> Iterator[Finding]:
    """Look at one thing after another; a check that breaks is itself a finding, never an exception."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _cuda,
        _java,
        lambda: _package("TorchServe", "torchserve", "torchserve"),
        lambda: _package("archiver", "torch-model-archiver", "torch-model-archiver"),
        lambda: _package(
            "YAML", "PyYAML", "PyYAML", why="without it TorchServe's workers die while /ping says Healthy"
        ),
        lambda: _checkpoint(checkpoint),
        _disk,
        _ports,
    ]
    for check in checks:
        try:
            yield check()
        except Exception as error:
            name = getattr(check, "__name__", "check").strip("_")
            yield Finding("fail", name, f"{type(error).__name__}: {error}", "report this: the check itself broke")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding("ok", "Python", version)
    return Finding("fail", "Python", version, "use Python 3.10, 3.11 or 3.12: TorchServe is not tested with others")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("fail", "torch", str(error), "pip install -c constraints.txt torch")
    return Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")


def _cuda() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("warn", "CUDA", "unknown without torch")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        detail = f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        return Finding("ok", "CUDA", detail)
    reason = "this torch is a CPU build" if torch.version.cuda is None else "no usable GPU or driver"
    return Finding(
        "warn", "CUDA", f"none ({reason}): running on the CPU", "fine for the demo, slow with the real weights"
    )


def _java() -> Finding:
    from shoal.serving.java import find_java

    try:
        java = find_java()
    except ShoalError as error:
        return Finding("fail", "Java", "none found", str(error).split(": ", 1)[-1])
    return Finding("ok", "Java", f"{java.version} from {java.source} ({java.executable})")


def _package(what: str, distribution: str, install: str, why: str = "") -> Finding:
    try:
        return Finding("ok", what, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install -c constraints.txt {install}"
        return Finding("fail", what, "not installed" + (f": {why}" if why else ""), remedy)


def _checkpoint(given: str | Path | None) -> Finding:
    from shoal.project import find_checkpoint

    try:
        path = find_checkpoint(given)
        if path is None:
            remedy = "make demo makes one; for speech, set CHECKPOINT to the real weights' directory (see the README)"
            return Finding("warn", "checkpoint", "none: random weights will be used, which make noise", remedy)
        from shoal.speech import FishSpeech

        FishSpeech.load(path)
    except ShoalError as error:
        return Finding(
            "fail", "checkpoint", str(error), "repair or download it again, or name another with --checkpoint"
        )
    return Finding("ok", "checkpoint", f"{path} loads")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    if free < MINIMUM_FREE_GB:
        return Finding(
            "warn", "disk", f"{free:.1f} GB free here", f"set-up needs {MINIMUM_FREE_GB:.0f} GB: free some space"
        )
    return Finding("ok", "disk", f"{free:.1f} GB free here")


def _ports() -> Finding:
    from shoal.project import state_dir
    from shoal.serving.background import running
    from shoal.serving.server import Ports

    left = running(state_dir() / "server.json")
    if left:
        return Finding("ok", "ports", f"our own server runs at {left.predict_url} (make stop ends it)")
    taken = Ports().taken()
    if taken:
        detail = f"{', '.join(map(str, taken))} on 127.0.0.1 taken by another program"
        return Finding("warn", "ports", detail, "make serve will take free ones and say which")
    return Finding("ok", "ports", "8080-8082, 7070 and 7071 on 127.0.0.1 are free")


def report(findings: Iterator[Finding]) -> bool:
    """Print findings as they come, one line each. True where none failed."""
    good = True
    colours = {"ok": "\033[32m", "warn": "\033[33m", "fail": "\033[31m"}
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for f in findings:
        good = good and f.status != "fail"
        mark = f"{colours[f.status]}{f.status:<4}\033[0m" if coloured else f"{f.status:<4}"
        print(f"{mark}  {f.what:<11} {f.detail}" + (f" -> {f.remedy}" if f.remedy else ""), flush=True)
    return good
