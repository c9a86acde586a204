"""Sound made beside the decoding is the sound made between two steps, and a codec that fails harms one request only."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from shoal import threads
from shoal.errors import OutOfMemoryError, ShoalError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech

TEXTS = ["One.", "Two, and a little more of it. Then a second sentence! And a third one?", "Three.", "Number four."]
PARAMS = SamplingParams(seed=5, max_new_tokens=40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


def load(checkpoint, workers):
    return FishSpeech.load(checkpoint, device="cpu", codec_workers=workers)


def run(model, requests):
    utterances = [model.scheduler.submit(request) for request in requests]
    model.scheduler.run(utterances)
    return utterances


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_the_same_sound(checkpoint, workers):
    beside, between = load(checkpoint, workers), load(checkpoint, 0)
    requests = [SpeechRequest(text, params=PARAMS, chunk_length=40, stream=i % 2 == 1) for i, text in enumerate(TEXTS)]
    ours = [u.result.audio for u in run(beside, requests)]
    theirs = [u.result.audio for u in run(between, requests)]
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) > 0
        # a stream's pieces end where the codec was free to take the next, so that only rounding may differ
        np.testing.assert_allclose(mine, other, atol=1e-5, rtol=0)


def test_a_stream_sounds_before_its_end_and_in_order(checkpoint):
    model = load(checkpoint, 2)
    whole = model.synthesize(TEXTS[1], params=PARAMS, use_cache=False).audio
    pieces = list(model.stream(TEXTS[1], params=PARAMS, use_cache=False))
    assert len(pieces) > 1
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-5, rtol=0)


def test_workers_compute_on_one_thread_and_leave_the_others_theirs(checkpoint, monkeypatch):
    model = load(checkpoint, 2)
    torch.set_num_threads(2)
    seen, real = {}, model.codec.decode_chunks

    def noted(*args):
        seen[threading.current_thread().name] = torch.get_num_threads()
        return real(*args)

    monkeypatch.setattr(model.codec, "decode_chunks", noted)
    model.generate_batch(TEXTS, params=PARAMS, use_cache=False)
    workers = {name: number for name, number in seen.items() if name.startswith("shoal-codec")}
    assert workers and set(workers.values()) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("error", "status"), [(ValueError("broken"), 500), (MemoryError("no room"), 507)])
def test_a_codec_that_fails_fails_its_request_only(checkpoint, monkeypatch, workers, error, status):
    model = load(checkpoint, workers)
    real, lock, failed = model.codec.decode_chunks, threading.Lock(), []

    def once(*args):
        with lock:
            first = not failed
            failed.append(None)
        if first:
            raise error
        return real(*args)

    monkeypatch.setattr(model.codec, "decode_chunks", once)
    utterances = run(model, [SpeechRequest(text, params=PARAMS, use_cache=False) for text in TEXTS])
    wrong = [u for u in utterances if u.error]
    assert [u.error.status for u in wrong] == [status]
    assert isinstance(wrong[0].error, OutOfMemoryError if status == 507 else ShoalError)
    assert str(error) in str(wrong[0].error)
    assert all(len(u.result.audio) for u in utterances if u.result)
    assert model.scheduler.idle and model.scheduler.live == 0
    assert len(model.synthesize("Again.", params=PARAMS).audio)


def test_what_is_cancelled_while_the_codec_has_it_stays_silent(checkpoint, monkeypatch):
    model = load(checkpoint, 1)
    real, go, begun = model.codec.decode_chunks, threading.Event(), threading.Event()

    def held(*args):
        begun.set()
        assert go.wait(30)
        return real(*args)

    monkeypatch.setattr(model.codec, "decode_chunks", held)
    scheduler = model.scheduler
    other = scheduler.submit(SpeechRequest(TEXTS[2], params=PARAMS, use_cache=False))
    utterance = scheduler.submit(SpeechRequest(TEXTS[0], params=SamplingParams(seed=1, max_new_tokens=10)))
    while not begun.is_set():
        scheduler.step()
    scheduler.cancel(utterance)
    go.set()
    scheduler.run([other])
    while scheduler.sound.busy:
        scheduler.step()
    assert utterance.result is None and utterance.error is not None and len(utterance.take_audio()) == 0
    assert len(other.result.audio)


def test_a_small_model_leaves_the_cores_to_the_codec(checkpoint, monkeypatch):
    model = load(checkpoint, 0).model
    torch.set_num_threads(2)
    assert threads.share_cores(model, None, None) == 2 and torch.get_num_threads() == 1
    assert threads.share_cores(model, None, None) == 2  # the next one knows how many there are
    assert threads.share_cores(model, None, 0) == 0 and torch.get_num_threads() == 2
    assert threads.share_cores(model, 3, None) == 3 and torch.get_num_threads() == 1
    monkeypatch.setattr(threads, "_SMALL_MODEL", 0)
    assert threads.share_cores(model, 2, None) == 0 and torch.get_num_threads() == 2
    assert threads.share_cores(model, 2, 1) == 1 and torch.get_num_threads() == 2


def test_loading_hands_the_numbers_on(checkpoint, monkeypatch):
    monkeypatch.setattr(threads, "_SMALL_MODEL", 0)
    model = FishSpeech.load(checkpoint, device="cpu", threads=1, codec_workers=3)
    assert torch.get_num_threads() == 1 and model.scheduler.sound.workers == 3
    assert FishSpeech.load(checkpoint, device="cpu", threads=2).scheduler.sound.workers == 0
    assert torch.get_num_threads() == 2
