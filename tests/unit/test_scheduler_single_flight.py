"""Equal requests at once decode once; whoever leaves or fails, the others get their speech."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from shoal.errors import CancelledError, RequestTimeoutError, ShoalError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech

TEXT = "The shoal turned as one. It had no leader, and it needed none! Who would follow? " * 4
P = SamplingParams(seed=3, temperature=0.9, max_new_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return FishSpeech.load(write_random_checkpoint(tmp_path_factory.mktemp("smoke")), device="cpu", max_batch_size=8)


@pytest.fixture
def speech(model, monkeypatch):
    model.cache.clear()
    prompts = model.prompts = []
    submit = model._engine.submit
    monkeypatch.setattr(model._engine, "submit", lambda *a, **k: prompts.append(1) or submit(*a, **k))
    return model


@pytest.fixture(scope="module")
def alone(model):
    return model.synthesize(TEXT, params=P, use_cache=False)


def same(result, alone):
    assert np.array_equal(result.features.codes, alone.features.codes)
    np.testing.assert_allclose(result.audio, alone.audio, atol=1e-5)
    assert result.seed == alone.seed


def request(**fields):
    return SpeechRequest(TEXT, **{"params": P, **fields})


def test_ten_at_once_decode_once(speech, alone):
    before = speech.cache.stats()
    results = speech.generate_batch([TEXT] * 10, params=P)
    assert len(speech.prompts) == len(alone.features.sentence_frames)
    assert [s.cache_hit for s in results] == [False] + 9 * [True]
    for result in results:
        same(result, alone)
    after = speech.cache.stats()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 9)
    assert len({id(s.audio) for s in results}) == 10  # nobody's array is another's


def test_ten_threads_at_once_decode_once(speech, alone):
    results, start = [], threading.Barrier(10)

    def call():
        start.wait()
        results.append(speech.synthesize(TEXT, params=P))

    threads = [threading.Thread(target=call) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 10 and len(speech.prompts) == len(alone.features.sentence_frames)
    for result in results:
        same(result, alone)


def test_requests_without_a_seed_share_one_too(speech):
    a, b = speech.generate_batch(["Any will do."] * 2, params=SamplingParams(max_new_tokens=20))
    assert a.seed == b.seed and np.array_equal(a.audio, b.audio)


def test_requests_that_want_no_cache_decode_for_themselves(speech):
    free = SamplingParams(max_new_tokens=20)
    results = speech.generate_batch(["Each its own."] * 3, params=free, use_cache=False)
    assert len(speech.prompts) == 3 and len({s.seed for s in results}) == 3
    speech.generate_batch(["Another."] * 3, params=[P, P, SamplingParams(seed=4, max_new_tokens=40)])
    assert len(speech.prompts) == 5


@pytest.mark.parametrize("part", [0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("leader_streams", [False, True])
@pytest.mark.parametrize("follower_streams", [False, True])
def test_the_next_goes_on_when_the_first_leaves(speech, alone, part, leader_streams, follower_streams):
    scheduler = speech.scheduler
    leader = scheduler.submit(request(stream=leader_streams))
    followers = [scheduler.submit(request(stream=follower_streams)) for _ in range(3)]
    first, *others = alone.features.sentence_frames
    for _ in range(int(part * (first + max(others)))):
        scheduler.step()
    assert not leader.done
    scheduler.cancel(followers[1])
    scheduler.cancel(leader, RequestTimeoutError("too late"))
    assert isinstance(leader.error, RequestTimeoutError) and isinstance(followers[1].error, CancelledError)
    pieces = []
    while not followers[0].done:
        scheduler.step()
        pieces.append(followers[0].take_audio())
    assert len(speech.prompts) == len(alone.features.sentence_frames)  # what was decoded is not decoded again
    assert followers[2].done and scheduler.idle and scheduler.live == 0
    for follower in (followers[0], followers[2]):
        same(follower.result, alone)
    np.testing.assert_allclose(np.concatenate(pieces), alone.audio, atol=1e-5)
    assert speech.synthesize(TEXT, params=P).cache_hit


def test_all_may_leave(speech):
    scheduler = speech.scheduler
    utterances = [scheduler.submit(request()) for _ in range(4)]
    scheduler.step()
    for utterance in utterances:
        scheduler.cancel(utterance)
    assert scheduler.idle and scheduler.live == 0 and scheduler.waiting == 0 and not scheduler._leaders
    assert not speech.synthesize(TEXT, params=P).cache_hit


def test_the_next_starts_anew_when_the_first_fails(speech, alone, monkeypatch):
    def explode(*_):
        raise RuntimeError("boom")

    scheduler = speech.scheduler
    leader, follower = (scheduler.submit(request()) for _ in range(2))
    other = scheduler.submit(SpeechRequest("Another.", params=P))
    with monkeypatch.context() as patch:
        patch.setattr(speech._engine, "_sample_frame", explode)
        assert set(scheduler.step()) == {leader, other}
    assert "boom" in str(leader.error)
    scheduler.run([follower])
    same(follower.result, alone)
    assert not follower.result.cache_hit and not scheduler._leaders


def test_when_every_attempt_fails_all_are_told(speech, monkeypatch):
    def refuse(*_, **__):
        raise ShoalError("does not fit")

    utterances = [speech.scheduler.submit(request()) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(speech._engine, "submit", refuse)
        speech.scheduler.run(utterances)
    assert all("does not fit" in str(u.error) for u in utterances) and speech.scheduler.idle


def test_a_follower_may_want_sound_where_the_first_wants_none(speech, alone):
    scheduler = speech.scheduler
    silent, loud = scheduler.submit(request(audio=False)), scheduler.submit(request())
    scheduler.run([silent, loud])
    assert len(silent.result.audio) == 0 and loud.result.cache_hit
    same(loud.result, alone)
    speech.cache.clear()
    loud, silent = scheduler.submit(request()), scheduler.submit(request(audio=False))
    scheduler.run([loud, silent])
    assert len(silent.result.audio) == 0 and len(loud.result.audio)
    speech.cache.clear()
    silent, loud = scheduler.submit(request(audio=False)), scheduler.submit(request())
    scheduler.step()
    scheduler.cancel(silent)
    scheduler.run([loud])
    same(loud.result, alone)


def test_a_cache_with_features_of_another_shape_is_not_believed(speech):
    from dataclasses import replace

    made = speech.extract_features("Poisoned.", params=P)
    key = speech.scheduler.submit(SpeechRequest("Poisoned.", params=P)).key
    speech.scheduler.step()
    for bad in (replace(made, fingerprint="0" * 16), replace(made, codes=made.codes[:3])):
        speech.cache.store_features(key, bad)
        spoken = speech.synthesize("Poisoned.", params=P)
        assert not spoken.cache_hit and np.array_equal(spoken.features.codes, made.codes)
