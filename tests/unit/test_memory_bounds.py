"""Under a given limit the caches stay below it at every moment of a load, and nothing else is left of it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from shoal.audio_cache import AudioCache
from shoal.cache import AudioFeatureCache
from shoal.pipeline import OptimizedSpeechPipeline
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech

P = SamplingParams(seed=3, max_new_tokens=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


def test_caches_stay_below_their_limit_while_a_load_runs(checkpoint):
    limit = 200_000
    speech = FishSpeech.load(checkpoint, device="cpu", max_batch_size=4, cache=AudioFeatureCache(None))
    speech.enable_audio_cache()
    speech.set_internal_cache_capacity(limit)
    rng = np.random.default_rng(0)
    most, step = [0], speech.scheduler.step

    def measured():
        ended = step()
        most[0] = max(most[0], speech.cached_bytes)
        return ended

    speech.scheduler.step = measured
    voices = [
        speech.voices.encode([(0.1 * rng.standard_normal(4410).astype(np.float32), f"Voice {i}.")]) for i in range(8)
    ]
    texts = [f"Distinct text number {i}, said by somebody." for i in range(48)]
    pipeline = OptimizedSpeechPipeline(speech, default_batch_size=4)
    results = pipeline.generate_optimized_speech(texts, [voices[i % 8] for i in range(48)], P)
    assert all(isinstance(r, Speech) and len(r.audio) for r in results)
    assert limit / 4 < most[0] <= limit
    speech.set_internal_cache_capacity(limit // 10)  # while it holds more
    assert speech.cached_bytes <= limit // 10
    speech.set_internal_cache_capacity(0)
    assert speech.cached_bytes == 0
    assert len(speech.synthesize("Still speaking.", voices[0], P).audio)


def test_sound_larger_than_its_share_is_not_kept():
    cache = AudioCache(1000)
    cache.store("small", bytes(900))
    cache.store("large", bytes(1001))
    assert cache.retrieve("small") is not None and cache.retrieve("large") is None and cache.nbytes == 900


def test_a_load_leaves_nothing_behind_but_what_the_caches_hold(checkpoint):
    """All sound and codes are NumPy's, whose memory tracemalloc sees: 96 results are 6 MB of sound."""
    speech = FishSpeech.load(checkpoint, device="cpu", max_batch_size=4, cache=AudioFeatureCache(None))
    speech.enable_audio_cache()
    speech.set_internal_cache_capacity("500KB")
    pipeline = OptimizedSpeechPipeline(speech, default_batch_size=4)
    texts = (f"Line {i:03} of a book that has no end." for i in range(96))
    results = pipeline.iter_optimized_speech(texts, params=SamplingParams(seed=1, max_new_tokens=8))
    assert all(isinstance(next(results), Speech) for _ in range(10))
    tracemalloc.start()
    try:
        seconds = sum(result.seconds for result in results)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    made = seconds * speech.sample_rate * 4
    assert made > 4 * 2**20
    assert held < 500 * 1024 + 2**20
    assert peak < made / 2  # the results that wait for a slower one, and one batch under way
