"""The guide's tables, measured: four strategies, a hundred texts and three scenarios, texts distinct and repeated.

    python -m benchmarks.guide_tables --checkpoint model_store/demo --batch 16 --rounds 3

Each figure is the median of `--rounds` (of `--upstream-rounds` for upstream, ten times slower, if that is given). In a
round the strategies take turns, each in a fresh process with the same number of threads. The ratio is of seconds of
work per second of sound, since no two systems speak a text equally long; the CPU ratio is the same of processor time,
which other programs on the machine disturb less.

Repeated texts: as many requests as texts, drawn from a quarter of them by Zipf's law, with caches empty at the start.
What the strategies are: benchmarks/guide_strategies.py.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from shoal.results import Result, new_result

from benchmarks import common
from benchmarks.guide_strategies import STRATEGIES, Job, encode_voice, measure
from benchmarks.texts import repeated, workloads

# Seconds for a hundred texts as the guide gives them, on a GPU that it does not name.
GUIDE_SECONDS = {"none": 185.0, "everything": 19.0}
TARGETS = {"100 texts, distinct": 10.0, "100 texts, repeated": 30.0, "10-minute audiobook, distinct": 8.0}

_HEADER = (
    "strategy",
    "s",
    "mean s",
    "p95 s",
    "texts/s",
    "MB",
    "RTF",
    "hits",
    "ratio",
    "CPU ratio",
    "guide s",
    "guide ratio",
)


def main(
    checkpoint: Annotated[str, typer.Option(help="checkpoint directory; default: the random smoke one")] = "",
    texts: Annotated[int, typer.Option(help="instead of 100; the scenarios shrink with it")] = 100,
    only: Annotated[str, typer.Option(help="workloads whose name contains this")] = "",
    batch: Annotated[int, typer.Option(help="texts that decode at a time")] = 16,
    rounds: int = 3,
    upstream_rounds: Annotated[int, typer.Option(help="rounds in which upstream runs too; default: all")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of every process")] = 1,
    device: str = "cpu",
    dtype: str = "float32",
    ours: Annotated[str, typer.Option(help="another dtype for Shoal alone, such as int8")] = "",
    voice: Annotated[str, typer.Option(help="a voice of the checkpoint, or none; default: its first")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="frames per text at most")] = 256,
    zipf: Annotated[float, typer.Option(help="exponent of the repeats")] = 1.0,
) -> None:
    """Measure; see the module's text."""
    directory = Path(checkpoint) if checkpoint else common.checkpoint_of("smoke")
    spoken = encode_voice(directory, voice or None)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, distinct in workloads(directory, texts).items():
        for kind, lines in (("distinct", distinct), ("repeated", repeated(distinct, zipf))):
            title = f"{name}, {kind}"
            if only not in title:
                continue
            runs: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in STRATEGIES}
            for round_ in range(rounds):
                # There and back again, so that what changes slowly on a machine favours nobody.
                for strategy in STRATEGIES if round_ % 2 == 0 else reversed(STRATEGIES):
                    if strategy == "none" and upstream_rounds and round_ >= upstream_rounds:
                        continue
                    kind_of_number = ours if ours and strategy != "none" else dtype
                    job = Job(
                        strategy, str(directory), lines, batch, threads, device, kind_of_number, max_new_tokens,
                        spoken, seed=1000 * round_,
                    )  # fmt: skip
                    runs[strategy].append(_run(job))
            results[title] = {strategy: _median(outcomes) for strategy, outcomes in runs.items()}
            _rate(results[title])
            _show(title, len(lines), len(set(lines)), results[title], guide=name == "100 texts")
    verdicts = _verdicts(results)
    for verdict in verdicts:
        print(verdict)
    content = {"results": results, "verdicts": verdicts, "texts": texts, "rounds": rounds, "zipf": zipf, "batch": batch}
    content |= {"upstream_rounds": upstream_rounds or rounds}
    content |= {"checkpoint": directory.name, "dtype": dtype, "ours": ours or dtype, "threads": threads}
    print(common.closing_line("guide_tables", **content, device=device, voice=bool(spoken)))


def compare_here(
    texts: list[str],
    checkpoint: Path,
    *,
    strategies: Sequence[str] = STRATEGIES,
    batch: int = 8,
    device: str = "cpu",
    max_new_tokens: int = 128,
    warm_up: int = 4,
    report: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """The strategies once, in this process: a small run for a notebook, quick rather than exact.

    Args:
        report: called with the strategy that is about to run.
        cancelled: asked before each; true ends with those that have run.

    Returns:
        strategy -> its figures, as in the tables; `ratio` is to the first strategy, by work per second of sound.
    """
    table: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        if cancelled and cancelled():
            break
        if report:
            report(strategy)
        threads = os.cpu_count() or 1
        job = Job(
            strategy, str(checkpoint), texts, batch, threads, device, "float32" if device == "cpu" else "bfloat16",
            max_new_tokens, None, seed=0, warm_up=warm_up,
        )  # fmt: skip
        row = measure(job)
        row["rtf"] = row["seconds"] / row["audio_seconds"]
        table[strategy] = row
    first = next(iter(table.values()), None)
    for row in table.values():
        row["ratio"] = first["rtf"] / row["rtf"]
    return table


def strategies_result(table: dict[str, dict[str, Any]], parameters: dict[str, Any]) -> Result:
    """What `compare_here` found as a record to keep, to compare and to report (`shoal.results`)."""
    rows = [
        {"strategy": name} | {key: value for key, value in row.items() if isinstance(value, (int, float))}
        for name, row in table.items()
    ]
    return new_result("guide_strategies", "The guide's strategies", rows, "strategy", parameters)


def _run(job: Job) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": str(job.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "benchmarks.guide_strategies"]
    done = subprocess.run(command, input=json.dumps(asdict(job)) + "\n", env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job.strategy} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _median(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure over the rounds; and how far apart the rounds were, in seconds of work per second of sound."""
    factors = [o["seconds"] / o["audio_seconds"] for o in outcomes]
    both = {
        key: None if outcomes[0][key] is None else round(statistics.median(o[key] for o in outcomes), 4)
        for key in outcomes[0]
    }
    return both | {
        "rtf": round(statistics.median(factors), 4),
        "rtf_spread": [round(min(factors), 4), round(max(factors), 4)],
    }


def _rate(table: dict[str, dict[str, Any]]) -> None:
    for row in table.values():
        row["ratio"] = round(table["none"]["rtf"] / row["rtf"], 2)
        row["cpu_ratio"] = round(_cpu_factor(table["none"]) / _cpu_factor(row), 2)


def _cpu_factor(row: dict[str, Any]) -> float:
    return row["cpu_seconds"] / row["audio_seconds"]


def _show(title: str, count: int, distinct: int, table: dict[str, dict[str, Any]], *, guide: bool) -> None:
    rows = []
    for strategy, row in table.items():
        hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        theirs = GUIDE_SECONDS.get(strategy) if guide else None
        figures = [row[key] for key in ("seconds", "mean_latency", "p95_latency", "texts_per_s")]
        ratios = [row["ratio"], row["cpu_ratio"]]
        guides = [theirs, GUIDE_SECONDS["none"] / theirs] if theirs else ["-", "-"]
        rows.append([strategy, *figures, round(row["memory_mb"]), row["rtf"], hits, *ratios, *guides])
    print(f"\n{title}: {count} requests, {distinct} different texts")
    print(common.table(_HEADER, rows), flush=True)


def _verdicts(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """What was aimed at, and what came out."""
    said = []
    for title, least in TARGETS.items():
        if title in results:
            ratio, cpu = (results[title]["everything"][key] for key in ("ratio", "cpu_ratio"))
            met = "reached" if ratio >= least else "not reached"
            said.append(f"{title}: {ratio}x ({cpu}x of processor time), aimed at {least:g}x: {met}")
    for title, table in results.items():
        for before, after in itertools.pairwise(STRATEGIES):
            if table[after]["rtf"] > table[before]["rtf"]:
                said.append(
                    f"{title}: {after} was slower than {before} ({table[after]['rtf']} to {table[before]['rtf']})"
                )
    return said


if __name__ == "__main__":
    typer.run(main)
