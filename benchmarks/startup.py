"""From a fresh process to the first sound: import, load, warm-up and the first request, in processes of their own.

    python -m benchmarks.startup --checkpoint model_store/demo

The median of `--repeats` processes; files are in the page cache after the first, which is not counted. `second_s` is
the same request again, what is left when all is warm. Ends in one JSON line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Annotated, Any

import typer

from benchmarks import common

_CHILD = """
import json, sys, time
begin = time.perf_counter()
import shoal
from shoal.speech import FishSpeech
from shoal.sampling import SamplingParams
imported = time.perf_counter()
speech = FishSpeech.load(sys.argv[1], device=sys.argv[2], dtype=sys.argv[3])
loaded = time.perf_counter()
params = SamplingParams(seed=1, max_new_tokens=16)
times = [loaded]
for i in range(2):
    list(speech.stream("Good morning.", params=params, use_cache=False))
    times.append(time.perf_counter())
import resource
print(json.dumps({"import_s": imported - begin, "load_s": loaded - imported, "first_s": times[1] - times[0],
                  "second_s": times[2] - times[1],
                  "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}))
"""


def main(
    checkpoint: Annotated[str, typer.Option(help="a directory, or smoke, mid, real")] = "model_store/demo",
    device: str = "cpu",
    dtypes: Annotated[str, typer.Option(help="by commas")] = "auto,int8",
    repeats: int = 3,
) -> None:
    """Measure; see the module's text."""
    directory = common.checkpoint_of(checkpoint) if checkpoint in ("smoke", "mid", "real") else checkpoint
    kinds = dtypes.split(",")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for round_ in range(repeats + 1):
        for kind in kinds:
            command = [sys.executable, "-c", _CHILD, str(directory), device, kind]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            if round_:
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    rows = [
        {"dtype": kind} | {key: round(statistics.median(r[key] for r in found), 3) for key in found[0]}
        for kind, found in runs.items()
    ]
    print(common.table(rows[0], [row.values() for row in rows]))
    print(common.closing_line("startup", checkpoint=str(checkpoint), device=device, repeats=repeats, rows=rows))


if __name__ == "__main__":
    typer.run(main)
