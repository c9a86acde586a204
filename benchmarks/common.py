"""What all benchmarks share: the machine in words, memory, bandwidth, the checkpoint of a size, the JSON line."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from shoal.random_checkpoint import Size, write_random_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets it."


def machine() -> dict[str, Any]:
    """Processor, threads, GPU and versions: what a figure needs beside it to mean something."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, f": {model}").split(":", 1)[1].strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def checkpoint_of(size: Size, seed: int = 0) -> Path:
    """A random checkpoint of that size, written once into .shoal/benchmarks."""
    directory = Path(".shoal") / "benchmarks" / f"{size}-{seed}"
    if not (directory / "done").exists():
        write_random_checkpoint(directory, size=size, seed=seed)
        (directory / "done").touch()
    return directory


def copy_bandwidth(device: str, seconds: float = 1.0) -> float:
    """Bytes per second that a plain copy of 256 MB reads and writes together; the median of repeats."""
    source = torch.empty(64 * 1024**2, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    times = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        times.append(timed(lambda: target.copy_(source), device))
    return 2 * source.nbytes / statistics.median(times)


def timed(work: Callable[[], Any], device: str) -> float:
    """Seconds that `work` takes, its kernels on the device included."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_memory_mb(device: str) -> float:
    """The most that was in use: allocated on the GPU, or resident in this process on the CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Right-aligned columns."""
    cells = [list(header), *[[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def closing_line(bench: str, **content: Any) -> str:
    """The JSON line that a benchmark ends in."""
    return json.dumps({"bench": bench, "machine": machine(), **content})
