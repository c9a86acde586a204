"""The Firefly decoder against upstream's own, with the same random weights, interleaved in one process.

    python -m benchmarks.codec --size real --batch 1,2,4,8 --frames 64 --threads 2

Upstream (fish-speech-lib's files, weight norm on, one row at a time), ours for each batch size, ours streamed (chunks
of 8, 16, 32 frames, then 64) and, with `--workers`, one row per worker take turns for `--repeats` rounds; the table has
medians of milliseconds per frame of sound, and the ratio to upstream's in the same run. The last lines say what share
of the whole the codec takes beside a language model that decodes as many rows, and how far bfloat16 is from float32.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
import typer
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.prompt import text_prompt
from shoal.sampling import SamplingParams
from shoal.sounding import start_workers
from shoal.speech import FishSpeech
from shoal.windows import decode_windows

from benchmarks import common
from benchmarks.engine import new_engine

_CHUNKS = (8, 16, 32)  # frames of the first streamed pieces; the others have 64


def main(
    size: Annotated[str, typer.Option(help="smoke, mid or real; or a checkpoint directory")] = "real",
    batch: Annotated[str, typer.Option(help="batch sizes, by commas")] = "1,2,4,8",
    frames: Annotated[int, typer.Option(help="frames per row")] = 64,
    repeats: Annotated[int, typer.Option(help="rounds of which the medians are taken")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads, 0: PyTorch's choice")] = 0,
    workers: Annotated[int, typer.Option(help="rows made side by side on one thread each, 0: not measured")] = 2,
    device: str = "cpu",
    lm: Annotated[bool, typer.Option(help="measure the codec's share beside the language model")] = True,
) -> None:
    """Measure; see the module's text."""
    if threads:
        torch.set_num_threads(threads)
    directory = common.checkpoint_of(size) if size in ("smoke", "mid", "real") else size
    speech = FishSpeech.load(directory, device=device, codec_workers=0)
    codec, sizes = speech.codec, [int(part) for part in batch.split(",")]
    upstream = upstream_codec(codec, device)
    if upstream is None:
        print("upstream's codec is left out: fish-speech-lib is not installed, or cannot build this geometry")
    codes = torch.randint(0, 1000, (max(sizes), codec.config.num_codebooks, frames), device=device)
    pool = start_workers(workers) if workers and device == "cpu" else None

    runs: dict[str, Callable[[], object]] = {}
    if upstream is not None:
        lengths = torch.tensor([frames], device=device)
        runs["upstream, 1 row"] = lambda: upstream.decode(codes[:1], lengths)
    for rows in sizes:
        runs[f"batch {rows}"] = lambda rows=rows: decode_windows(codec, list(codes[:rows]), [0] * rows)
    runs["streamed"] = lambda: stream(codec, codes[0])
    if pool is not None:
        runs[f"{workers} workers"] = lambda: side_by_side(codec, codes[:workers], pool)
    made = {"streamed": 1, "upstream, 1 row": 1, f"{workers} workers": workers} | {f"batch {n}": n for n in sizes}

    times: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        for round_ in range(repeats + 1):  # the first warms up
            for name, work in runs.items():
                seconds = common.timed(work, device)
                if round_:
                    times[name].append(seconds / frames / made[name])
    reference = statistics.median(times["upstream, 1 row"]) if upstream is not None else None
    rows_out = []
    for name, seconds in times.items():
        cost = statistics.median(seconds)
        rows_out.append(
            {
                "run": name,
                "ms_per_frame": round(1000 * cost, 3),
                "real_time_factor": round(cost * codec.config.frames_per_second, 4),
                "ratio": round(reference / cost, 2) if reference else None,
            }
        )
    print(f"{size}, {device}, {frames} frames a row, {torch.get_num_threads()} threads, median of {repeats}")
    print(common.table(rows_out[0], [row.values() for row in rows_out]))
    content = {"size": str(size), "device": device, "frames": frames, "repeats": repeats, "rows": rows_out}
    content["bfloat16_snr_db"] = round(bfloat16_snr(codec, codes[:1]), 1)
    print(f"bfloat16 against float32: {content['bfloat16_snr_db']} dB")
    if lm:
        content["share"] = {n: round(share(speech, n, rows_out), 3) for n in sizes}
        print(
            "the codec's share of the whole, by batch: "
            + ", ".join(f"{n}: {s:.0%}" for n, s in content["share"].items())
        )
    print(common.closing_line("codec", **content))


def upstream_codec(ours: Firefly, device: str) -> torch.nn.Module | None:
    """Upstream's codec of the same geometry, with random weights that ours then holds too; None if there is none."""
    import _pytest.outcomes

    from tests.parity import upstream_codec as oracle

    try:
        model = oracle.build(ours.config)
    except (_pytest.outcomes.Skipped, IndexError):  # its blocks have three dilations, whatever the configuration
        return None
    ours.load_state_dict(fold_weight_norm(model.state_dict()), strict=True)
    return model.to(device)


def stream(codec: Firefly, codes: torch.Tensor) -> None:
    """One row, chunk by chunk with the context that each needs."""
    start = 0
    for size in itertools.chain(_CHUNKS, itertools.repeat(64)):
        end = min(start + size, codes.shape[1])
        begin = max(0, start - codec.context_frames)
        decode_windows(codec, [codes[:, begin:end]], [start - begin])
        if (start := end) == codes.shape[1]:
            return


def side_by_side(codec: Firefly, codes: torch.Tensor, pool: ThreadPoolExecutor) -> None:
    """One row per worker, as `shoal.sounding` does."""

    def one(row: torch.Tensor) -> None:
        with torch.inference_mode():
            decode_windows(codec, [row], [0])

    list(pool.map(one, codes))


def bfloat16_snr(codec: Firefly, codes: torch.Tensor) -> float:
    """Signal over error, in dB, of the codec in bfloat16."""
    with torch.inference_mode():
        exact = codec.decode(codes)
        state = {name: tensor.bfloat16() for name, tensor in codec.state_dict().items()}
        rough = Firefly.from_state(codec.config, state).decode(codes)
    return float(10 * torch.log10(exact.square().mean() / (exact - rough).square().mean()))


def share(speech: FishSpeech, rows: int, table: list[dict]) -> float:
    """The codec's part of the time per frame when `rows` decode together and their sound is made afterwards."""
    device = str(speech.device)
    engine = new_engine(speech, rows)
    prompt = text_prompt(speech.tokenizer, speech.num_codebooks, common.TEXT)
    for i in range(rows):
        engine.submit(prompt, SamplingParams(seed=i), force_frames=12)
    steps = []
    while engine.live or engine.waiting:
        steps.append(common.timed(engine.step, device))
    decoding = 1000 * statistics.median(steps[2:]) / rows
    codec = next(row["ms_per_frame"] for row in table if row["run"] == f"batch {rows}")
    return codec / (codec + decoding)


if __name__ == "__main__":
    typer.run(main)
