"""One strategy of the guide on one list of texts, in a process of its own; prints one JSON line. See guide_tables.py.

    echo '{"texts": ["Hello."], ...}' | python -m benchmarks.guide_strategies

- none: upstream as shipped (fish-speech 0.1.0's loop), one text at a time. Loading is not counted.
- batching: Shoal decodes side by side, and that is all: no cache, and a job of its own that loads the weights first,
  which is counted.
- batching + model caching: the weights are there already (`enable_model_weights_cache`).
- everything: `configure_model_caching`, features and sound are kept (`OptimizedSpeechPipeline`), and the codec works
  beside the language model, on the same number of threads.

Before the clock starts each speaks some other texts of several lengths, as a server has done before its next request.
"""

from __future__ import annotations

import base64
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from shoal.baseline import UpstreamBaseline
from shoal.caching import configure_model_caching
from shoal.errors import ShoalError
from shoal.pipeline import OptimizedSpeechPipeline
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.voices import Voice

from benchmarks import common

WARM_UP = [f"Warming up{', and up' * (i % 8)}, number {i}." for i in range(16)]
STRATEGIES = ("none", "batching", "batching + model caching", "everything")


@dataclass
class Job:
    """What a process is asked to do."""

    strategy: str
    checkpoint: str
    texts: list[str]
    batch: int
    threads: int
    device: str
    dtype: str
    max_new_tokens: int
    voice: str | None  # Voice.to_bytes, base64
    seed: int
    warm_up: int = 16  # texts spoken before the clock starts, by upstream a quarter of them


@dataclass
class Outcome:
    """What came of it; latencies run from when a text is handed to the engine until all its sound is there."""

    seconds: float = 0.0  # wall clock
    cpu_seconds: float = 0.0  # of this process: what is left of the figure where other programs disturb it
    audio_seconds: float = 0.0
    failed: int = 0
    hit_rate: float | None = None
    latencies: list[float] = field(default_factory=list)


def run_upstream(job: Job, voice: Voice | None) -> Outcome:
    model = UpstreamBaseline.load(job.checkpoint, device=job.device, dtype=getattr(torch, job.dtype))
    prompt = voice.prompt if voice else None
    for text in WARM_UP[: max(1, job.warm_up // 4)]:
        model.synthesize(text, max_new_tokens=min(64, job.max_new_tokens), voice=prompt, top_p=0.0)
    out = Outcome()
    begin, cpu = time.perf_counter(), time.process_time()
    for i, text in enumerate(job.texts):
        own = time.perf_counter()
        try:
            audio = model.synthesize(text, max_new_tokens=job.max_new_tokens, voice=prompt, seed=job.seed + i)
            out.audio_seconds += len(audio) / model.sample_rate
        except ShoalError:  # upstream picks a token that has no code and ends: its time counts, its sound does not
            out.failed += 1
        out.latencies.append(time.perf_counter() - own)
    out.seconds, out.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return out


def run_shoal(job: Job, voice: Voice | None) -> Outcome:
    everything, cold = job.strategy == "everything", job.strategy == "batching"

    def load() -> FishSpeech:
        return FishSpeech.load(
            job.checkpoint,
            device=job.device,
            dtype=job.dtype,
            max_batch_size=job.batch,
            threads=job.threads,
            codec_workers=None if everything else 0,
        )

    model = load()
    for count in (1, job.warm_up):
        model.generate_batch(WARM_UP[:count], voice, SamplingParams(max_new_tokens=job.max_new_tokens), use_cache=False)
    if not cold:
        model.enable_model_weights_cache()
    if everything:
        configure_model_caching(model).enable_audio_cache()
    out = Outcome()
    begin, cpu = time.perf_counter(), time.process_time()
    if cold:
        model = load()
    clock = _Clock(model)
    pipeline = OptimizedSpeechPipeline(model, default_batch_size=job.batch, enable_feature_caching=everything)
    # With no seed a repeated text may be answered from a cache; with one the strategies without speak the same.
    params = SamplingParams(max_new_tokens=job.max_new_tokens, seed=None if everything else job.seed)
    for result in pipeline.iter_optimized_speech(job.texts, voice, params):
        if isinstance(result, ShoalError):
            out.failed += 1
        else:
            out.audio_seconds += result.seconds
    out.seconds, out.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    out.latencies = clock.latencies
    out.hit_rate = model.cache.stats().hit_rate if everything else None
    return out


class _Clock:
    """Notes when each utterance goes into a model's scheduler and when it is done."""

    def __init__(self, model: FishSpeech) -> None:
        scheduler, self.latencies = model.scheduler, []
        submit, step = scheduler.submit, scheduler.step
        began: dict[Any, float] = {}

        def timed_submit(request: Any) -> Any:
            begin = time.perf_counter()
            utterance = submit(request)
            began[utterance] = begin
            return utterance

        def timed_step() -> Sequence[Any]:
            ended = step()
            now = time.perf_counter()
            self.latencies += [now - began.pop(utterance) for utterance in ended if utterance in began]
            return ended

        scheduler.submit, scheduler.step = timed_submit, timed_step


def measure(job: Job) -> dict[str, Any]:
    """Do a job in this process; its figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    voice = Voice.from_bytes(base64.b64decode(job.voice)) if job.voice else None
    try:
        out = run_upstream(job, voice) if job.strategy == "none" else run_shoal(job, voice)
    finally:
        torch.set_num_threads(threads)
    ordered = sorted(out.latencies)
    return {
        "seconds": out.seconds,
        "cpu_seconds": out.cpu_seconds,
        "audio_seconds": out.audio_seconds,
        "failed": out.failed,
        "hit_rate": out.hit_rate,
        "mean_latency": statistics.mean(ordered),
        "p95_latency": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "texts_per_s": len(job.texts) / out.seconds,
        "memory_mb": common.peak_memory_mb(job.device),
    }


def main() -> None:
    """Do the job on standard input."""
    print(json.dumps(measure(Job(**json.loads(sys.stdin.readline())))))


def encode_voice(checkpoint: Path, name: str | None) -> str | None:
    """A registered voice of a checkpoint for `Job.voice`: the named one, else the first, else none."""
    model = FishSpeech.load(checkpoint, device="cpu")
    names = model.voices.names()
    if name == "none" or not (name or names):
        return None
    return base64.b64encode(model.voices.resolve(name or names[0]).to_bytes()).decode()


if __name__ == "__main__":
    main()
