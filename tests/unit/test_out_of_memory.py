"""When memory runs out the same sentences decode once more, fewer at a time, and more again when it has been quiet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal.backoff import MemoryBackoff
from shoal.errors import OutOfMemoryError, is_out_of_memory
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech

TEXTS = [f"Text number {i}." for i in range(6)]
PARAMS = SamplingParams(seed=4, max_new_tokens=30)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def model(checkpoint):
    return FishSpeech.load(checkpoint, device="cpu", max_batch_size=8)


def room_for(model, rows, monkeypatch, *, times=10**9, after=0):
    """Have the model's device hold `rows` rows and no more; `times` bounds how often, `after` the steps before."""
    advance, sample, left, steps = model._engine._advance, model._engine._sample_frame, [times], [0]

    def limited(hidden, greedy):
        steps[0] += 1
        if len(hidden) > rows and left[0] > 0 and steps[0] > after:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return sample(hidden, greedy)

    monkeypatch.setattr(model._engine, "_sample_frame", limited)
    return advance


def run(model, texts=TEXTS, **options):
    utterances = [model.scheduler.submit(SpeechRequest(t, params=PARAMS, use_cache=False, **options)) for t in texts]
    for _ in range(2000):
        if all(u.done for u in utterances):
            return utterances
        model.scheduler.step()
    raise AssertionError("somebody waits for ever")


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_nobody_notices_when_half_as_many_fit(model, monkeypatch, after, stream):
    expected = [u.result for u in run(model, stream=stream)]
    room_for(model, 3, monkeypatch, after=after)
    done = run(model, stream=stream)
    for utterance, result in zip(done, expected, strict=True):
        assert utterance.error is None
        assert np.array_equal(utterance.result.features.codes, result.features.codes)
        np.testing.assert_allclose(utterance.result.audio, result.audio, atol=1e-5)
    assert model.scheduler.out_of_memory == 1 and model.scheduler.batch_limit in (2, 3)


def test_who_runs_out_twice_gets_507_and_the_others_go_on(model, monkeypatch):
    room_for(model, 2, monkeypatch)
    done = run(model)
    failed = [u for u in done if u.error]
    assert len(failed) == 3 and {u.error.status for u in failed} == {507}
    assert all(isinstance(u.error, OutOfMemoryError) and "batch limit" in str(u.error) for u in failed)
    assert all(u.result.seconds > 0 for u in done if u.result)
    assert model.scheduler.batch_limit == 1 and model.scheduler.live == 0


def test_where_nothing_fits_everyone_is_told_and_later_requests_work(model, monkeypatch):
    with monkeypatch.context() as patch:
        room_for(model, 0, patch)
        assert {u.error.status for u in run(model)} == {507}
    assert model.scheduler.idle and model._engine.kv_bytes == 0
    assert all(u.result for u in run(model))


def test_a_voice_that_does_not_fit_is_tried_again_and_then_refused(model, monkeypatch):
    rng = np.random.default_rng(0)
    voice = model.voices.register("v", [(rng.standard_normal(44100).astype(np.float32) * 0.1, "Words.")])
    real, left = model.voices.prefix, [1]

    def prefix(voice):
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return real(voice)

    monkeypatch.setattr(model.voices, "prefix", prefix)
    assert all(u.result for u in run(model, voice=voice))
    left[0] = 10**9
    assert {u.error.status for u in run(model, voice=voice)} == {507}


def test_a_first_sentence_that_cannot_become_a_voice_fails_its_text_only(model, monkeypatch):
    monkeypatch.setattr(model, "compute_prefix", lambda prompt: (_ for _ in ()).throw(MemoryError("full")))
    long_text = "A first sentence here. And a second one! " * 6
    first, *others = run(model, [long_text, *TEXTS[:2]])
    assert first.error.status == 507 and all(u.result for u in others)


def test_the_limit_halves_and_comes_back():
    now = [0.0]
    backoff = MemoryBackoff(16, clock=lambda: now[0])
    assert backoff.limit() == 16
    assert backoff.ran_out(10) == 5 and backoff.ran_out(5) == 2 and backoff.ran_out(1) == 1 and backoff.ran_out(0) == 1
    limits = []
    for _ in range(6):
        now[0] += 10.0
        limits.append(backoff.limit())
    assert limits == [2, 4, 8, 16, 16, 16]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("x"), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_ways_of_saying_so(error, expected):
    assert is_out_of_memory(error) is expected
