"""Memory-constrained mode: a load's measured peak stays under the limit that was given, and exceeds it without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.errors import ShoalError
from shoal.memory import limit_memory, memory_in_use
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are measured by Linux's /proc here"
)

# Misses and hits, a long text, kept sound: all that takes memory, for a process of its own.
LOAD = """
import json, sys
from pathlib import Path
from shoal.caching import configure_model_caching
from shoal.memory import limit_memory
from shoal.pipeline import OptimizedSpeechPipeline
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

checkpoint, room = sys.argv[1], int(sys.argv[2])
speech = FishSpeech.load(checkpoint, device="cpu", max_batch_size=16, threads=1)
speech.generate_batch(["Warm up."], params=SamplingParams(max_new_tokens=4), use_cache=False)
speech.enable_audio_cache("1GB")
configure_model_caching(speech, "1GB")
in_use = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
plan = limit_memory(speech, in_use + room, frames=256) if room else None
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
params = SamplingParams(seed=1, temperature=0.9, max_new_tokens=200)
texts = [f"This is text {i}, which differs from all others, and is said in a batch with some." for i in range(40)]
texts.append(" ".join(texts[:12]))
pipeline = OptimizedSpeechPipeline(speech, default_batch_size=16)
seconds = caches = 0
for _ in range(2):
    for result in pipeline.iter_optimized_speech(texts, params=params):
        seconds += result.seconds
        caches = max(caches, speech.cached_bytes)
speech.audio_cache.clear()  # so that all of this is decoded by the codec, together
recalled = [s.features for s in speech.generate_batch(texts[:40], params=params)]
peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(json.dumps({
    "grown": peak * 1024 - in_use, "seconds": seconds, "caches": caches, "batch": speech.scheduler.batch_limit,
    "plan": plan.__dict__ if plan else None, "hits": speech.cache.stats().hits,
}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


def load(checkpoint, room):
    out = subprocess.run([sys.executable, "-c", LOAD, checkpoint, str(room)], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_a_load_stays_under_its_limit(checkpoint):
    room = 180 * 2**20
    free, bound = load(checkpoint, 0), load(checkpoint, room)
    assert free["grown"] > room  # so the limit binds
    assert bound["grown"] < room
    assert 1 < bound["batch"] < free["batch"]
    assert 0 < bound["caches"] <= bound["plan"]["caches"] <= room // 4
    assert bound["seconds"] == pytest.approx(free["seconds"]) and bound["hits"] > 0


def test_a_limit_that_nothing_fits_into_says_what_would_do(checkpoint):
    speech = FishSpeech.load(checkpoint, device="cpu", max_batch_size=16)
    with pytest.raises(ShoalError, match=r"give at least \d"):
        limit_memory(speech, memory_in_use(speech.device) + 10 * 2**20)
    assert speech.scheduler.batch_limit == 16
    with pytest.raises(ShoalError, match="give at least"):
        limit_memory(speech, "1MB")
    plan = limit_memory(speech, "64GB")
    assert plan.batch_limit == 16 and plan.codec_frames == 1024
    assert len(speech.synthesize("Hello.", params=SamplingParams(max_new_tokens=10)).audio)
