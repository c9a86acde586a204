"""All benchmarks at real size on a GPU, and the tests that need one; results go to benchmarks/results.

    make bench-gpu        or        python -m benchmarks.gpu --checkpoint DIR

Without a checkpoint the weights are random, in the published geometry: speed is the same. One file per benchmark, named
after the card; a benchmark that fails is named at the end, and the others still run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

_RESULTS = Path(__file__).parent / "results"


def main(
    checkpoint: Annotated[str, typer.Option(help="real weights for the guide's tables; default: random ones")] = "",
    quick: Annotated[bool, typer.Option(help="few repeats, to see that everything runs")] = False,
) -> None:
    """Measure; see the module's text."""
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no CUDA GPU here: these benchmarks need one, the others run on a CPU too")
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    repeats = "1" if quick else "5"
    batches, common = "1,2,4,8,16,32,64,128", ["--device", "cuda", "--repeats", repeats]
    frames = "64" if quick else "256"
    jobs = {
        "engine-bfloat16": ["engine", "--size", "real", "--dtype", "bfloat16", "--batch", batches, "--frames", frames],
        "engine-int8": ["engine", "--size", "real", "--dtype", "int8", "--batch", "1,8,32", "--frames", frames],
        "engine-no-graphs": ["engine", "--size", "real", "--dtype", "bfloat16", "--batch", "1,32", "--no-graphs"],
        "codec": ["codec", "--size", "real", "--batch", "1,8,32"],
        "prefix": ["prefix", "--size", "real", "--batch", "1,16"],
        "startup": ["startup", "--checkpoint", checkpoint or "real", "--dtypes", "bfloat16"],
    }
    failed = []
    tests = [sys.executable, "-m", "pytest", "-q", "tests/unit/test_graphs.py", "tests/unit/test_engine.py"]
    if subprocess.run(tests).returncode:
        failed.append("tests")
    for name, (module, *options) in jobs.items():
        if not _run(f"{name}-{card}", [f"benchmarks.{module}", *options, *common]):
            failed.append(name)
    tables = ["benchmarks.guide_tables", "--device", "cuda", "--dtype", "bfloat16", "--batch", "32"]
    tables += ["--rounds", "1" if quick else "3", "--checkpoint", checkpoint or ".shoal/benchmarks/real-0"]
    if not _run(f"guide_tables-{card}", tables):
        failed.append("guide_tables")
    if failed:
        raise SystemExit("failed: " + ", ".join(failed))


def _run(name: str, command: list[str]) -> bool:
    """Run one benchmark, show what it prints and keep its last line."""
    print(f"\n== {name}: python -m {' '.join(command)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line
    if process.returncode:
        return False
    (_RESULTS / f"{name}.json").write_text(json.dumps(json.loads(last), indent=1, ensure_ascii=False) + "\n")
    return True


if __name__ == "__main__":
    typer.run(main)
