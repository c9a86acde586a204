"""The feature cache: what its keys cover, what it keeps, drops and counts; the switches and sizes around it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import shoal
from shoal.audio_cache import AudioCache
from shoal.cache import AudioFeatureCache
from shoal.caching import configure_model_caching, get_recommended_cache_size, pre_load_common_features
from shoal.errors import RequestError
from shoal.features import Features
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.sizes import format_bytes, parse_bytes
from shoal.speech import FishSpeech
from shoal.weights import release_weights, shared_weights

P = SamplingParams(seed=3, max_new_tokens=20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def speech(checkpoint):
    return FishSpeech.load(checkpoint, device="cpu", max_batch_size=8)


def features(frames=10, seed=0, cost_s=0.5, text="x"):
    codes = np.random.default_rng(seed).integers(0, 1000, (8, frames)).astype(np.int16)
    return Features(codes, (frames,), (0.0,), text, seed, "f" * 16, cost_s)


# -- keys


def test_keys_are_the_same_in_another_process():
    program = (
        "from shoal.cache import AudioFeatureCache as C; from shoal.sampling import SamplingParams as P;"
        "print(C().generate_cache_key('안녕, hello 🐟', 'v1', P(seed=7), 'abc', 150))"
    )
    theirs = {subprocess.check_output([sys.executable, "-c", program], text=True).strip() for _ in range(2)}
    assert theirs == {
        AudioFeatureCache().generate_cache_key("안녕, hello 🐟", "v1", SamplingParams(seed=7), "abc", 150)
    }


def test_keys_cover_all_that_changes_the_sound(monkeypatch):
    def key(text="Hello, you.", voice="v", params=P, fingerprint="f", chunk_length=200):
        return AudioFeatureCache().generate_cache_key(text, voice, params, fingerprint, chunk_length)

    keys = [key(), key(text="Hello, me."), key(voice=None), key(voice="w"), key(fingerprint="g"), key(chunk_length=100)]
    other = {"temperature": 0.1, "top_p": 0.1, "repetition_penalty": 1.0, "seed": None, "max_new_tokens": 21}
    assert set(other) == {f.name for f in fields(SamplingParams)}
    keys += [key(params=replace(P, **{name: value})) for name, value in other.items()]
    monkeypatch.setattr(shoal, "__version__", "99")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_keys_are_of_the_text_as_spoken():
    key = AudioFeatureCache().generate_cache_key
    assert key("  Hello,,, you 🐟 ", None, P, "f") == key("Hello, you", None, P, "f")
    assert key("한글", None, P, "f") == key("한글", None, P, "f")  # composed, as a Mac sends it
    assert key("a", None, SamplingParams(temperature=1), "f") == key("a", None, SamplingParams(temperature=1.0), "f")
    with pytest.raises(RequestError):
        key("🐟", None, P, "f")


def test_voices_count_by_their_content(speech):
    audio = 0.1 * np.random.default_rng(0).standard_normal(speech.sample_rate).astype(np.float32)
    speech.voices.register("a", [(audio, "Said.")])
    speech.voices.register("b", [(audio, "Said.")])
    speech.voices.register("c", [(-audio[::-1].copy(), "Said.")])
    assert not speech.synthesize("Hi there.", "a", P).cache_hit
    assert speech.synthesize("Hi there.", "b", P).cache_hit
    assert not speech.synthesize("Hi there.", "c", P).cache_hit
    speech.voices.register("a", [(-audio[::-1].copy(), "Said.")])  # the name now means another voice
    assert np.array_equal(
        speech.synthesize("Hi there.", "a", P).features.codes, speech.synthesize("Hi there.", "c", P).features.codes
    )


# -- memory


def test_the_least_recently_used_leaves_first():
    cache = AudioFeatureCache(cache_max_entries=3)
    for name in "abc":
        cache.store_features(name, features())
    assert cache.retrieve_features("a") is not None
    cache.store_features("d", features())
    assert [name for name in "abcd" if cache.in_memory(name)] == ["a", "c", "d"]
    cache.store_features("a", features(20))  # replaced, not added
    stats = cache.stats()
    assert (stats.entries, stats.evictions) == (3, 1)
    assert stats.bytes == features(20).nbytes + 2 * features().nbytes


def test_bytes_bound_it_too():
    size = features().nbytes
    cache = AudioFeatureCache(cache_max_entries=None, cache_max_bytes=3 * size + 1)
    for i in range(10):
        cache.store_features(str(i), features(seed=i))
        assert cache.stats().bytes <= cache.cache_max_bytes
    assert cache.stats().entries == 3
    cache.store_features("large", features(1000))  # more than all the room there is
    assert cache.in_memory("large") is None and cache.stats().entries == 3
    cache.set_capacity(2 * size)
    assert cache.stats().entries == 2
    assert AudioFeatureCache(cache_max_bytes="1.5GB").cache_max_bytes == 3 * 2**29


def test_hits_misses_and_saved_seconds_are_counted():
    cache = AudioFeatureCache()
    cache.retrieve_features("a")
    cache.store_features("a", features(cost_s=0.5))
    cache.retrieve_features("a")
    cache.retrieve_features("a")
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.seconds_saved) == (2, 1, 1.0)
    assert stats.hit_rate == pytest.approx(2 / 3)
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes, cache.stats().hits) == (0, 0, 2)


def test_threads_may_use_it_at_once():
    cache = AudioFeatureCache(cache_max_entries=20, cache_max_bytes=25 * features().nbytes)
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(2000):
                key = str(rng.integers(40))
                found = cache.retrieve_features(key)
                assert found is None or found.seed == int(key)
                cache.store_features(key, features(int(rng.integers(1, 20)), seed=int(key)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = cache.stats()
    assert stats.hits + stats.misses == 8000 and stats.entries <= 20
    assert stats.bytes == sum(f.nbytes for f in cache._memory._entries.values()) <= cache.cache_max_bytes


def test_nothing_is_kept_where_nothing_may_be():
    for cache in (AudioFeatureCache(0), AudioFeatureCache(cache_max_bytes=0)):
        assert not cache.enabled
        cache.store_features("a", features())
        assert cache.retrieve_features("a") is None


@pytest.mark.parametrize(
    ("size", "count"), [("1.5GB", 1610612736), ("512 MiB", 2**29), ("64k", 65536), (10, 10), ("7", 7), ("2 tb", 2**41)]
)
def test_sizes_are_read(size, count):
    assert parse_bytes(size) == count


@pytest.mark.parametrize("size", ["", "much", "-1GB", -1, "1.5.5GB", None, True, float("inf"), float("nan")])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(RequestError, match="is no size"):
        parse_bytes(size)


def test_sizes_are_written():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**29)] == ["0 B", "1023 B", "1.5 KB", "1.5 GB"]


# -- the model's switches


def test_without_feature_caching_nothing_is_looked_up_or_kept(speech):
    speech.config.enable_intermediate_feature_caching = False
    first = speech.generate_batch(["One.", "One."], params=P)
    assert not any(s.cache_hit for s in first) and not speech.synthesize("One.", params=P).cache_hit
    assert speech.cache.stats() == AudioFeatureCache().stats()
    speech.config.enable_intermediate_feature_caching = True
    speech.synthesize("One.", params=P)
    assert speech.synthesize("One.", params=P).cache_hit


def test_a_request_without_a_seed_may_be_answered_from_the_cache(speech):
    params = SamplingParams(max_new_tokens=20)
    first, second = (
        speech.synthesize("Any voice will do.", params=params),
        speech.synthesize("Any voice will do.", params=params),
    )
    assert second.cache_hit and second.seed == first.seed
    assert not speech.synthesize("Any voice will do.", params=replace(params, seed=first.seed)).cache_hit


def test_features_come_without_sound_and_give_the_same_sound(speech, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(speech.codec, "decode_chunks", None)  # calling it would fail
        made = speech.extract_features("Only the codes, please. And of two sentences.", params=P)
        again = speech.extract_features("Only the codes, please. And of two sentences.", params=P)
    assert again is made and made.cost_s > 0
    spoken = speech.synthesize("Only the codes, please. And of two sentences.", params=P)
    assert spoken.cache_hit and len(spoken.audio)
    assert np.array_equal(spoken.audio, speech.synthesize_from_features(made).audio)


def test_kept_sound_saves_the_codec(speech, monkeypatch):
    speech.enable_audio_cache("10MB")
    first = speech.synthesize("Say it again.", params=P)
    first_audio = first.audio.copy()
    first.audio[:] = 0  # the caller's own copy
    with monkeypatch.context() as patch:
        patch.setattr(speech.codec, "decode_chunks", None)
        again = speech.synthesize("Say it again.", params=P)
        streamed = np.concatenate(list(speech.stream("Say it again.", params=P)))
        recalled = speech.synthesize_from_features(first.features)
    for audio in (again.audio, streamed, recalled.audio):
        assert np.array_equal(audio, first_audio)
    speech.enable_audio_cache(0)
    assert speech.audio_cache is None and len(speech.synthesize("Say it again.", params=P).audio)


def test_sound_is_kept_by_features_format_rate_and_speed():
    cache = AudioCache("1KB")
    a, b = features(), features(seed=1)
    keys = {
        cache.generate_key(a),
        cache.generate_key(b),
        cache.generate_key(a, "mp3"),
        cache.generate_key(a, "mp3", sample_rate=24000),
        cache.generate_key(a, "mp3", speed=1.5),
        cache.generate_key(replace(a, pauses_s=(0.2,)), "mp3"),
    }
    assert len(keys) == 6 and cache.generate_key(features()) == cache.generate_key(a)
    for key in keys:
        cache.store(key, bytes(400))
    assert len(cache) == 2 and cache.nbytes == 800


def test_internal_cache_capacity_bounds_all_caches_together(speech):
    speech.enable_audio_cache()
    speech.set_internal_cache_capacity("4MB")
    bounds = (
        speech.cache.cache_max_bytes,
        speech.audio_cache.max_bytes,
        speech.voices._encoded.max_bytes,
        speech.voices._prefixes.max_bytes,
    )
    assert sum(bounds) == 4 * 2**20 and min(bounds) > 0
    assert speech.cache.cache_max_entries is None
    for i in range(12):
        audio = 0.1 * np.random.default_rng(i).standard_normal(speech.sample_rate).astype(np.float32)
        speech.synthesize(f"Number {i}.", speech.voices.encode([(audio, "Said.")]), P)
    assert 0 < speech.cached_bytes <= 4 * 2**20
    speech.set_internal_cache_capacity(0)
    assert speech.cached_bytes == 0


def test_weights_are_shared_in_the_process_until_released(checkpoint):
    release_weights()
    first = FishSpeech.load(checkpoint, device="cpu")
    assert FishSpeech.load(checkpoint, device="cpu").model is not first.model
    first.enable_model_weights_cache()
    second = FishSpeech.load(checkpoint, device="cpu")
    assert second.model is first.model and second.codec is first.codec
    spoken = second.synthesize("Hello.", params=P)
    assert np.array_equal(spoken.audio, first.synthesize("Hello.", params=P).audio)
    assert FishSpeech.load(checkpoint, device="cpu", dtype="bfloat16").model is not first.model
    model = weakref.ref(first.model)
    del first, second
    gc.collect()
    assert model() is not None  # kept, though no pipeline uses it
    third = FishSpeech.load(checkpoint, device="cpu")
    assert third.model is model()
    third.enable_model_weights_cache(False)
    del third
    gc.collect()
    assert model() is None and shared_weights() == []


def test_threads_that_load_at_once_share_one_copy(checkpoint):
    release_weights()
    loaded = []
    threads = [
        threading.Thread(target=lambda: loaded.append(FishSpeech.load(checkpoint, device="cpu", weights_cache=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(s.model) for s in loaded}) == 1
    release_weights()


@pytest.mark.parametrize(
    ("gigabytes", "size"),
    [(0, "0.5GB"), (6, "0.5GB"), (7.6, "1.5GB"), (11, "1.5GB"), (11.9, "3GB"), (16, "3GB"), (23.6, "5GB"), (80, "5GB")],
)
def test_the_recommended_size_follows_the_gpu(gigabytes, size):
    assert get_recommended_cache_size(int(gigabytes * 2**30)) == size


def test_model_caching_is_configured_at_once(speech):
    release_weights()
    speech.config.enable_intermediate_feature_caching = False
    assert configure_model_caching(speech, "64MB") is speech
    assert speech.config.enable_intermediate_feature_caching
    assert [w.model for w in shared_weights()] == [speech.model]
    assert 0 < speech.cache.cache_max_bytes < 64 * 2**20
    configure_model_caching(speech)
    assert speech.cache.cache_max_bytes > 64 * 2**20
    release_weights()


def test_phrases_are_loaded_in_advance(speech):
    texts = ["Hello.", "Goodbye.", "", "Thank you.", "Hello."]
    seen = []
    done = pre_load_common_features(speech, texts, P, batch_size=2, progress=lambda *at: seen.append(at))
    assert (done.decoded, done.known, list(done.failed)) == (3, 1, [""])
    assert seen == [(i, 5) for i in range(1, 6)]
    assert all(speech.synthesize(text, params=P).cache_hit for text in texts if text)
    again = pre_load_common_features(speech, texts, P)
    assert (again.decoded, again.known) == (0, 4)
