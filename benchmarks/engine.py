"""Frames per second of the engine against upstream's own loop, on the same random weights, interleaved in one process.

    python -m benchmarks.engine --size real --batch 1,8,16 --frames 16

Upstream (fish-speech 0.1.0, one request at a time, whole static cache, whole head) and each batch size of ours take
turns for `--repeats` rounds; the table shows medians, and the ratios are to upstream's medians in the same run: `ratio`
of frames per second with the prompts' prefill included, `step_ratio` of decoding alone. Batch 1 is a model loaded with
`max_batch_size=1`, whose weights a CPU gets laid out for one row. MBU is the bytes of weights and KV that a step must
read, over the bandwidth of a plain copy measured in the same process.

With `--dtype int8` upstream runs in float32 (bfloat16 on a GPU); `over_exact` is our speed over our own in that dtype,
in the same rounds, and a line says how far the quantised model's choices are from the exact one's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from shoal.baseline import UpstreamBaseline
from shoal.engine import Engine
from shoal.model.linear import weight_bytes
from shoal.prompt import text_prompt
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

from benchmarks import common


def main(
    size: Annotated[str, typer.Option(help="smoke, mid or real; or a checkpoint directory")] = "mid",
    dtype: str = "float32",
    device: str = "cpu",
    batch: Annotated[str, typer.Option(help="batch sizes, by commas")] = "1,2,4,8,16,32",
    frames: Annotated[int, typer.Option(help="frames per request")] = 32,
    repeats: Annotated[int, typer.Option(help="rounds of which the medians are taken")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads, 0: PyTorch's choice")] = 0,
    graphs: Annotated[bool, typer.Option(help="steps as CUDA graphs, on a GPU")] = True,
    upstream: Annotated[bool, typer.Option(help="run upstream's loop too")] = True,
    profile: Annotated[bool, typer.Option(help="show where a step's time goes")] = False,
) -> None:
    """Measure; see the module's text."""
    if threads:
        torch.set_num_threads(threads)
    sizes = [int(part) for part in batch.split(",")]
    directory = common.checkpoint_of(size) if size in ("smoke", "mid", "real") else size
    reference_dtype = dtype if dtype != "int8" else "float32" if device == "cpu" else "bfloat16"
    exact = FishSpeech.load(directory, device=device, dtype=reference_dtype, codec_workers=0)
    speech = exact if dtype != "int8" else FishSpeech.load(directory, device=device, dtype=dtype, codec_workers=0)
    # As who speaks one text at a time would load it: a CPU has a layout of its own for that.
    lone_dtypes = {reference_dtype, dtype} if 1 in sizes and device == "cpu" else set()
    lone = {kind: FishSpeech.load(directory, device=device, dtype=kind, max_batch_size=1) for kind in lone_dtypes}
    baseline = None
    if upstream:
        baseline = UpstreamBaseline.load(directory, device=device, dtype=getattr(torch, reference_dtype))
    bandwidth = common.copy_bandwidth(device)
    params = SamplingParams(seed=1)

    def run_upstream() -> tuple[float, float]:
        # greedy costs upstream the same as sampling, and cannot pick a token that has no code
        with _clocked_upstream(baseline, device) as calls:
            total = common.timed(lambda: baseline.generate_codes(common.TEXT, frames=frames, top_p=0.0), device)
        return frames / total, statistics.median(calls[1:])

    def run_ours(rows: int, speech: FishSpeech) -> tuple[float, float]:
        speech = lone.get(speech.precision, speech) if rows == 1 else speech
        engine = new_engine(speech, rows, graphs)
        prompt = text_prompt(speech.tokenizer, speech.num_codebooks, common.TEXT)
        for i in range(rows):
            engine.submit(prompt, params, seed=i, force_frames=frames)
        steps = []
        while engine.live or engine.waiting:
            prefills = engine.waiting > 0
            seconds = common.timed(engine.step, device)
            steps.append((seconds, prefills))
        decode = statistics.median(seconds for seconds, prefills in steps if not prefills)
        return rows * frames / sum(seconds for seconds, _ in steps), decode

    theirs: list[tuple[float, float]] = []
    ours: dict[int, list[tuple[float, float]]] = defaultdict(list)
    exactly: dict[int, list[float]] = defaultdict(list)
    for round_ in range(repeats + 1):  # the first round warms up
        upstream_speed = run_upstream() if baseline else (0.0, 0.0)
        speeds = {rows: run_ours(rows, speech) for rows in sizes}
        if round_ and exact is not speech:
            for rows in sizes:
                exactly[rows].append(run_ours(rows, exact)[0])
        if round_:
            theirs.append(upstream_speed)
            for rows, speed in speeds.items():
                ours[rows].append(speed)

    frames_per_second = speech.codec.config.frames_per_second
    reference, reference_step = (statistics.median(column) for column in zip(*theirs, strict=True))
    rows_out = []
    for rows in sizes:
        speed = statistics.median(s for s, _ in ours[rows])
        step = statistics.median(s for _, s in ours[rows])
        rows_out.append(
            {
                "batch": rows,
                "frames_per_s": round(speed, 2),
                "ms_per_step": round(step * 1000, 2),
                "real_time_factor": round(frames_per_second / speed, 4),
                "ratio": round(speed / reference, 2) if reference else None,
                "step_ratio": round(rows * reference_step / step, 2) if reference else None,
                **({"over_exact": round(speed / statistics.median(exactly[rows]), 2)} if exactly else {}),
                "mbu": round(step_bytes(speech, rows, frames) / step / bandwidth, 3),
                "peak_mb": round(common.peak_memory_mb(device)),
            }
        )
    print(f"{size}, {dtype}, {device}, {frames} frames a request, median of {repeats}; copy {bandwidth / 1e9:.1f} GB/s")
    if baseline:
        print(f"upstream's loop: {reference:.2f} frames/s, {1000 * reference_step:.1f} ms per frame once it decodes")
    print(common.table(rows_out[0], [row.values() for row in rows_out]))
    difference = compare_precision(exact, speech) if exact is not speech else None
    if difference:
        print(f"{dtype} against {reference_dtype}: " + ", ".join(f"{k} {v}" for k, v in difference.items()))
    profiles = None
    if profile:
        profiles = {
            rows: profile_step(lone.get(dtype, speech) if rows == 1 else speech, rows, frames, device) for rows in sizes
        }
    for rows, parts in (profiles or {}).items():
        total = sum(parts.values())
        print(f"batch {rows}: " + ", ".join(f"{k} {v:.2f} ms ({v / total:.0%})" for k, v in parts.items()))
    print(
        common.closing_line(
            "engine",
            size=size,
            dtype=dtype,
            device=device,
            frames=frames,
            repeats=repeats,
            upstream_frames_per_s=round(reference, 3),
            upstream_ms_per_frame=round(1000 * reference_step, 2),
            copy_gb_per_s=round(bandwidth / 1e9, 2),
            rows=rows_out,
            **({"against_exact": difference} if difference else {}),
            **({"profile_ms": profiles} if profiles else {}),
        )
    )


def compare_precision(exact: FishSpeech, rough: FishSpeech) -> dict[str, float]:
    """How far a quantised model is from the exact one, and how much less it takes in memory."""
    from benchmarks.precision import compare

    sizes = [weight_bytes(speech.model) for speech in (rough, exact)]
    return compare(exact, rough) | {"memory_share": round(sizes[0] / sizes[1], 3)}


def new_engine(speech: FishSpeech, rows: int, graphs: bool = True) -> Engine:
    """An engine of its own over the model's weights."""
    return Engine(
        speech.model,
        im_end_id=speech.tokenizer.im_end_id,
        semantic_begin_id=speech.tokenizer.semantic_begin_id,
        max_batch_size=rows,
        check_every=1 if speech.device.type == "cpu" else 4,
        graphs="auto" if graphs else "off",
    )


def step_bytes(speech: FishSpeech, rows: int, frames: int) -> float:
    """Bytes that one step cannot avoid reading: slow layers, head, fast layers once per pass, the used KV."""
    model, c = speech.model, speech.model.config
    passes = c.num_codebooks - 1
    slow = weight_bytes(model.layers) + weight_bytes(model.head)
    fast = weight_bytes(model.fast_layers) + weight_bytes(model.fast_output)
    prompt = text_prompt(speech.tokenizer, speech.num_codebooks, common.TEXT).shape[1]
    kv = rows * (prompt + frames / 2) * c.kv_bytes_per_token(model.dtype.itemsize)
    return slow + passes * fast + kv


def profile_step(speech: FishSpeech, rows: int, frames: int, device: str) -> dict[str, float]:
    """Milliseconds of a step by part; what no part claims is Python and bookkeeping."""
    engine = new_engine(speech, rows, graphs=False)  # what is captured cannot be clocked
    prompt = text_prompt(speech.tokenizer, speech.num_codebooks, common.TEXT)
    for i in range(rows):
        engine.submit(prompt, SamplingParams(seed=1), seed=i, force_frames=frames)
    engine.step()  # prefill
    spent: dict[str, float] = defaultdict(float)
    with _clocked(speech, spent, device):
        begin = time.perf_counter()
        steps = 0
        while engine.live:
            engine.step()
            steps += 1
        common.synchronize(device)
        total = time.perf_counter() - begin
    parts = {name: seconds / steps * 1000 for name, seconds in spent.items()}
    parts["python"] = total / steps * 1000 - sum(parts.values())
    return {name: round(value, 3) for name, value in parts.items()}


@contextlib.contextmanager
def _clocked_upstream(baseline: UpstreamBaseline, device: str) -> Iterator[list[float]]:
    """Seconds of each of upstream's frames; the first one holds the prefill."""
    module = baseline._inference
    decode, calls = module.decode_one_token_ar, []

    def timed(*args, **kwargs):
        results = []
        calls.append(common.timed(lambda: results.append(decode(*args, **kwargs)), device))
        return results[0]

    module.decode_one_token_ar = timed
    try:
        yield calls
    finally:
        module.decode_one_token_ar = decode


@contextlib.contextmanager
def _clocked(speech: FishSpeech, spent: dict[str, float], device: str) -> Iterator[None]:
    """Wrap the parts of a step in clocks for the time being."""
    import shoal.engine as engine_module

    def clocked(name: str, work):
        def run(*args, **kwargs):
            common.synchronize(device)
            begin = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                common.synchronize(device)
                spent[name] += time.perf_counter() - begin

        return run

    model = speech.model
    sample = engine_module.sample
    names = {"slow": "slow layers", "fast": "fast layers", "logits": "head"}
    for method, name in names.items():
        object.__setattr__(model, method, clocked(name, getattr(model, method)))
    engine_module.sample = clocked("sampling", sample)
    try:
        yield
    finally:
        engine_module.sample = sample
        for method in names:
            object.__delattr__(model, method)


if __name__ == "__main__":
    typer.run(main)
