"""FishSpeech: one text, many texts, long texts, streams, voices and cached features give the same speech."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
import soundfile
from shoal.errors import CancelledError, CapacityError, RequestError, ShoalError, TooLargeError
from shoal.joining import pause_after
from shoal.prompt import VoicePrompt
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest
from shoal.speech import FishSpeech

TEXTS = ["안녕하세요, 반갑습니다.", "Hello, nice to meet you.", "こんにちは、はじめまして。", "Mixed 한국어 text 123!"]
P = SamplingParams(seed=3, max_new_tokens=40)
STORY = "The shoal turned as one. It had no leader, and it needed none! Who would follow? " * 4


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    directory = write_random_checkpoint(tmp_path_factory.mktemp("smoke"))
    return FishSpeech.load(directory, device="cpu", max_batch_size=8)


@pytest.fixture(scope="module")
def voice(speech):
    rng = np.random.default_rng(0)
    audio = (0.1 * rng.standard_normal(speech.sample_rate)).astype(np.float32)
    return speech.voices.register("narrator", [(audio, "What the reference says.")])


def test_batches_give_what_single_calls_give(speech):
    single = [speech.synthesize(text, params=P, use_cache=False) for text in TEXTS]
    together = speech.generate_batch(TEXTS, params=P, use_cache=False)
    for a, b in zip(single, together, strict=True):
        assert np.array_equal(a.features.codes, b.features.codes)
        np.testing.assert_allclose(a.audio, b.audio, atol=1e-5)
        assert a.batch_size == 1 and b.batch_size == len(TEXTS) and not b.cache_hit
        assert b.seconds == len(b.audio) / 44100 > 0


def test_parameters_can_differ_per_text(speech):
    params = [SamplingParams(seed=i, temperature=i / 2, max_new_tokens=20) for i in range(3)]
    together = speech.generate_batch(["Same text."] * 3, params=params, use_cache=False)
    assert len({s.features.codes.tobytes() for s in together}) == 3
    with pytest.raises(RequestError, match="one for all"):
        speech.generate_batch(TEXTS, params=params)


def test_the_seed_decides_and_is_told(speech):
    drawn = speech.synthesize("Some words.", params=SamplingParams(max_new_tokens=20), use_cache=False)
    again = speech.synthesize("Some words.", params=SamplingParams(seed=drawn.seed, max_new_tokens=20), use_cache=False)
    assert np.array_equal(drawn.features.codes, again.features.codes)


def test_cached_and_recalled_features_give_the_same_audio(speech):
    first = speech.synthesize("To be remembered.", params=P)
    hit = speech.synthesize("To be remembered.", params=P)
    assert not first.cache_hit and hit.cache_hit and hit.seed == first.seed
    assert np.array_equal(first.audio, hit.audio)
    recalled = speech.synthesize_from_features(speech.extract_features("To be remembered.", params=P))
    assert np.array_equal(first.audio, recalled.audio)
    long = speech.synthesize(STORY, params=P)
    np.testing.assert_allclose(speech.synthesize_from_features(long.features).audio, long.audio, atol=1e-5)


def test_without_cache_nothing_is_read_or_kept(speech):
    before = speech.cache.stats()
    speech.synthesize("Never remembered.", params=P, use_cache=False)
    assert not speech.synthesize("Never remembered.", params=P, use_cache=False).cache_hit
    assert speech.cache.stats() == before


@pytest.mark.parametrize("text", [TEXTS[1], STORY], ids=["short", "long"])
@pytest.mark.parametrize("named", [None, "narrator"])
def test_a_stream_joined_is_the_whole(speech, voice, text, named):
    params = SamplingParams(seed=5, max_new_tokens=60)
    whole = speech.synthesize(text, named, params, use_cache=False)
    pieces = list(speech.stream(text, named, params, use_cache=False))
    assert len(pieces) > 1
    joined = np.concatenate(pieces)
    assert joined.shape == whole.audio.shape
    np.testing.assert_allclose(joined, whole.audio, atol=1e-5)


def test_a_stream_starts_early_and_can_be_left(speech):
    params = SamplingParams(seed=2, temperature=0.9, max_new_tokens=500)
    stream = speech.stream(STORY, params=params, use_cache=False)
    first = next(stream)
    assert len(first) <= 10 * speech.codec.config.samples_per_frame
    stream.close()
    assert speech.scheduler.idle and speech.scheduler.live == 0


def test_sentences_decode_side_by_side_in_one_voice(speech, voice):
    spoken = speech.synthesize(STORY, "narrator", P, use_cache=False)
    assert len(spoken.features.sentence_frames) > 1
    assert spoken.batch_size == len(spoken.features.sentence_frames)
    with_first = speech.synthesize(STORY, None, P, use_cache=False)  # here the first sentence becomes the voice
    assert with_first.batch_size == len(with_first.features.sentence_frames) - 1


def test_sentences_are_joined_with_pauses_and_without_clicks(speech):
    spoken = speech.synthesize(STORY, params=P, use_cache=False)
    f, rate = spoken.features, speech.sample_rate
    assert f.pauses_s[-1] == 0 and all(pause == 0.2 for pause in f.pauses_s[:-1])
    per_frame = speech.codec.config.samples_per_frame
    expected = sum(f.sentence_frames) * per_frame + round(sum(f.pauses_s) * rate)
    assert abs(len(spoken.audio) - expected) <= len(f.pauses_s)
    end = f.sentence_frames[0] * per_frame
    gap = spoken.audio[end : end + round(0.2 * rate)]
    assert np.abs(gap).max() == 0
    assert abs(spoken.audio[end - 1]) < 1e-3 and abs(spoken.audio[end + len(gap)]) < 1e-3


@pytest.mark.parametrize(
    ("text", "seconds"), [("End.", 0.2), ('"End!"', 0.2), ("끝。", 0.2), ("so,", 0.1), ("cut", 0.0), ("", 0.0)]
)
def test_pauses_follow_the_punctuation(text, seconds):
    assert pause_after(text) == seconds


@pytest.mark.slow
def test_ten_thousand_characters_in_bounded_memory(speech):
    text = ("The fish swam on, and on, under the quiet moon. " * 220)[:10_000]
    tracemalloc.start()
    spoken = speech.synthesize(text, params=SamplingParams(seed=1, max_new_tokens=12), use_cache=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(spoken.features.sentence_frames) > 40 and spoken.batch_size == 8
    assert peak < 10 * spoken.audio.nbytes + 50e6
    assert speech._engine.kv_bytes < 20e6


def test_voices_are_encoded_and_prefilled_once(speech, voice):
    audio = np.linspace(-0.1, 0.1, speech.sample_rate, dtype=np.float32)
    first, second = (speech.voices.encode([(audio, "Said.")]) for _ in range(2))
    assert first is second and first.id != voice.id
    assert speech.voices.prefix(first) is speech.voices.prefix(second)
    assert speech.voices.resolve(VoicePrompt(first.prompt.texts, first.prompt.codes)).id == first.id
    a, b = (speech.synthesize("Hi there.", v, P, use_cache=False) for v in (None, "narrator"))
    assert not np.array_equal(a.features.codes, b.features.codes)


def test_voices_come_from_a_folder(speech, tmp_path):
    noise = 0.1 * np.random.default_rng(1).standard_normal(16000)
    (tmp_path / "anna").mkdir()
    soundfile.write(tmp_path / "anna" / "a.wav", noise, 16000)
    (tmp_path / "anna" / "a.lab").write_text("Anna speaks.", encoding="utf-8")
    soundfile.write(tmp_path / "ben.flac", noise, 16000)
    (tmp_path / "ben.txt").write_text("Ben speaks.", encoding="utf-8")
    assert speech.voices.load_folder(tmp_path) == ["anna", "ben"]
    assert speech.synthesize("Hello.", "ben", P).seconds > 0
    soundfile.write(tmp_path / "dumb.wav", noise, 16000)
    with pytest.raises(ShoalError, match=r"dumb\.txt"):
        speech.voices.load_folder(tmp_path)
    (tmp_path / "dumb.txt").write_text("x")
    (tmp_path / "dumb.wav").write_bytes(b"no sound")
    with pytest.raises(ShoalError, match="cannot be read as audio"):
        speech.voices.load_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", RequestError, "text"),
        ("   \n", RequestError, "text"),
        ("🐟🎉", RequestError, "letter or digit"),
        ("x" * 20_001, TooLargeError, "20000|20,000"),
        ("\ud800", RequestError, "surrogate"),
    ],
)
def test_texts_that_cannot_be_spoken(speech, text, error, said):
    with pytest.raises(error, match=said):
        speech.generate_batch(["A good one.", text], params=P)
    assert speech.scheduler.idle


def test_unknown_voices_are_named_with_the_known_ones(speech, voice):
    with pytest.raises(RequestError, match=r"'nobody'; known voices: .*narrator"):
        speech.synthesize("Hi.", "nobody")


def test_threads_share_the_steps(speech):
    alone = [speech.synthesize(text, params=P, use_cache=False) for text in TEXTS]
    results = [None] * len(TEXTS)

    def call(i):
        results[i] = speech.synthesize(TEXTS[i], params=P, use_cache=False)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for a, b in zip(alone, results, strict=True):
        assert np.array_equal(a.features.codes, b.features.codes)


def test_a_full_scheduler_refuses_and_cancelled_utterances_make_room(speech):
    scheduler = speech.scheduler
    limit, scheduler.max_waiting = scheduler.max_waiting, 3
    try:
        request = SpeechRequest("Wait here.", params=P, use_cache=False)
        utterances = [scheduler.submit(request) for _ in range(3)]
        with pytest.raises(CapacityError) as caught:
            scheduler.submit(request)
        assert caught.value.retry_after_s > 0
        scheduler.step()
        scheduler.cancel(utterances[0])
        assert isinstance(utterances[0].error, CancelledError)
        scheduler.run([scheduler.submit(request), *utterances[1:]])
        assert scheduler.idle
    finally:
        scheduler.max_waiting = limit


def test_an_error_while_decoding_fails_what_was_in_it_and_nothing_after(speech, monkeypatch):
    def explode(*_):
        raise RuntimeError("boom")

    utterance = speech.scheduler.submit(SpeechRequest("Doomed.", params=P, use_cache=False))
    with monkeypatch.context() as patch:
        patch.setattr(speech._engine, "_sample_frame", explode)
        ended = speech.scheduler.step()
    assert ended == [utterance] and "boom" in str(utterance.error)
    assert speech.synthesize("Fine again.", params=P, use_cache=False).seconds > 0


def test_features_of_another_checkpoint_are_refused(speech):
    from dataclasses import replace

    features = speech.extract_features("Hello.", params=P)
    with pytest.raises(RequestError, match="another"):
        speech.synthesize_from_features(replace(features, fingerprint="0" * 16))


def test_speech_is_saved(speech, tmp_path):
    spoken = speech.synthesize("Keep this.", params=P)
    spoken.save(tmp_path / "out.wav")
    audio, rate = soundfile.read(tmp_path / "out.wav")
    assert rate == 44100 and len(audio) == len(spoken.audio)
