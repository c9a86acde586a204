"""Tiers behind the cache: they survive restarts, damage and absence, and nothing in them is ever unpickled."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import shoal.voices
from shoal.cache import AudioFeatureCache
from shoal.errors import ShoalError
from shoal.features import Features
from shoal.packing import DamagedError, pack, unpack
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.tiers import DiskTier, RedisTier
from shoal.voices import Voice

from tests.redis_server import NO_REDIS, RedisServer, redis_server_binary

P = SamplingParams(seed=3, max_new_tokens=20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


def features(frames=10, seed=0, text="물고기"):
    codes = np.random.default_rng(seed).integers(0, 1000, (8, frames)).astype(np.int16)
    return Features(codes, (frames - 3, 3), (0.2, 0.0), text, seed, "f" * 16, 0.25)


def same(a, b):
    return a.to_bytes() == b.to_bytes() and np.array_equal(a.codes, b.codes) and a.codes.dtype == b.codes.dtype


# -- bytes


def test_features_come_back_from_bytes():
    made = features()
    back = Features.from_bytes(made.to_bytes())
    assert same(back, made) and back.digest == made.digest and back.pauses_s == (0.2, 0.0)
    assert len(made.to_bytes()) < made.codes.nbytes + 500
    assert back.codes.flags.writeable and back.codes.flags.owndata


def test_damage_is_seen_wherever_it_is():
    data = features().to_bytes()
    for end in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(DamagedError):
            Features.from_bytes(data[:end])
    for at in range(len(data)):
        with pytest.raises(DamagedError):
            Features.from_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
    for wrong in (b"", data + b"x", pickle.dumps(features().codes), None, "text"):
        with pytest.raises(DamagedError):
            Features.from_bytes(wrong)


@pytest.mark.parametrize(
    ("changes", "arrays"),
    [
        ({"sentence_frames": [10, 3]}, None),
        ({"sentence_frames": []}, None),
        ({"sentence_frames": [-3, 13]}, None),
        ({"sentence_frames": "many"}, None),
        ({"pauses_s": [0.2]}, None),
        ({"pauses_s": [1e9, 0]}, None),
        ({"pauses_s": [float("nan"), 0]}, None),
        ({"seed": None}, None),
        ({}, []),
        ({}, [np.zeros(10)]),
    ],
)
def test_what_is_whole_but_makes_no_sense_is_damage_too(changes, arrays):
    fields, found = unpack("features", features().to_bytes())
    with pytest.raises(DamagedError):
        Features.from_bytes(pack("features", fields | changes, found if arrays is None else arrays))
    with pytest.raises(DamagedError, match="'voice', not 'features'"):
        Features.from_bytes(pack("voice", fields, found))


# -- disk


def test_entries_survive_into_another_process(tmp_path):
    cache = AudioFeatureCache(tiers=[DiskTier(tmp_path)])
    cache.store_features("key", features())
    program = (
        "import sys; from shoal.cache import AudioFeatureCache; from shoal.tiers import DiskTier;"
        "c = AudioFeatureCache(tiers=[DiskTier(sys.argv[1])]); f = c.retrieve_features('key');"
        "print(f.digest, f.text, c.stats().tier_hits)"
    )
    out = subprocess.check_output([sys.executable, "-c", program, tmp_path], text=True)
    assert out.split() == [features().digest, features().text, "{'disk':", "1}"]
    assert os.stat(tmp_path).st_mode & 0o077 == 0 or tmp_path.stat().st_uid == os.getuid()


def test_what_a_slow_tier_has_moves_up(tmp_path):
    AudioFeatureCache(tiers=[DiskTier(tmp_path / "b")]).store_features("key", features())
    upper, lower = DiskTier(tmp_path / "a"), DiskTier(tmp_path / "b")
    cache = AudioFeatureCache(tiers=[upper, lower])
    for _ in range(3):
        assert same(cache.retrieve_features("key"), features())
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.tier_hits, stats.entries) == (3, 0, {"disk": 1}, 1)
    assert stats.seconds_saved == 3 * 0.25
    assert upper.get("features:key") == lower.get("features:key")
    cache.clear(tiers=True)
    assert cache.retrieve_features("key") is None and len(upper) == len(lower) == 0


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5], lambda data: b"", lambda data: data[:30] + b"?" + data[31:]]
)
def test_a_damaged_entry_is_a_miss_logged_and_removed(tmp_path, caplog, damage):
    tier = DiskTier(tmp_path)
    AudioFeatureCache(tiers=[tier]).store_features("key", features())
    tier.put("features:key", damage(tier.get("features:key")))
    cache = AudioFeatureCache(tiers=[tier])
    assert cache.retrieve_features("key") is None and cache.stats().misses == 1
    assert "damaged and removed" in caplog.text and len(tier) == 0


class Bomb:
    def __reduce__(self):
        return os._exit, (66,)


def test_nothing_is_unpickled(tmp_path):
    tier = DiskTier(tmp_path)
    tier.put("features:key", features().to_bytes())
    bomb = pickle.dumps(Bomb())
    (tmp_path / "bomb.val").write_bytes(bomb)
    with sqlite3.connect(tmp_path / "cache.db") as db:
        rows = [("value", 4, None, bomb), ("file", 4, "bomb.val", None), ("plain", 1, None, bomb)]
        for key, mode, filename, value in rows:  # mode 4: diskcache would unpickle it
            db.execute(
                "INSERT INTO Cache (key, raw, store_time, access_time, mode, filename, value) VALUES (?,1,0,0,?,?,?)",
                (f"features:{key}", mode, filename, value),
            )
        db.execute(  # a key that is a pickle itself
            "INSERT INTO Cache (key, raw, store_time, access_time, mode, value) VALUES (?,0,0,0,1,?)", (bomb, bomb)
        )
    db.close()
    cache = AudioFeatureCache(tiers=[DiskTier(tmp_path)])
    for key in ("value", "file", "plain"):
        assert cache.retrieve_features(key) is None
    assert cache.retrieve_features("key") is not None
    cache.clear(tiers=True)
    assert (tmp_path / "bomb.val").exists()  # a name in the database deletes no file


@pytest.mark.parametrize("wreck", ["garbage", "header", "truncated", "empty"])
@pytest.mark.parametrize("live", [False, True])
def test_a_damaged_database_is_made_anew(tmp_path, caplog, wreck, live):
    tier = DiskTier(tmp_path, rest_s=0.0)
    for i in range(200):
        tier.put(f"features:{i}", features(100, i).to_bytes())
    tier._cache.close()  # so that all of it is in the one file
    file = tmp_path / "cache.db"
    data = file.read_bytes()
    file.write_bytes(
        {
            "garbage": os.urandom(len(data)),
            "header": b"x" * 100 + data[100:],
            "truncated": data[: len(data) // 2],
            "empty": b"",
        }[wreck]
    )
    tier = tier if live else DiskTier(tmp_path, rest_s=0.0)
    cache = AudioFeatureCache(0, tiers=[tier])
    for i in range(200):
        found = cache.retrieve_features(str(i))
        assert found is None or same(found, features(100, i))
    for _ in range(2):  # where the damage is found only now, the first is lost
        cache.store_features("new", features())
    assert same(cache.retrieve_features("new"), features())


def test_the_disk_is_bounded_and_the_least_recently_used_leaves(tmp_path):
    tier = DiskTier(tmp_path, "1MB")
    entry = features(1000).to_bytes()  # 16 KB
    tier.put("old", entry)
    for i in range(200):
        tier.put(str(i), entry)
        if i % 5 == 0:
            assert tier.get("old") is not None  # used, so it stays
        assert tier.nbytes < 1.2 * 2**20
    assert 20 < len(tier) < 70 and tier.get("0") is None and tier.get("199") is not None
    assert sum(f.stat().st_size for f in tmp_path.glob("cache.db")) < 1.3 * 2**20
    tier.put("huge", bytes(2**19))
    assert tier.get("huge") is None


def test_a_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError, match=r"file/sub: a cache cannot be kept there"):
        DiskTier(tmp_path / "file" / "sub")


def test_a_failing_disk_only_costs_its_hits(tmp_path, caplog):
    tier = DiskTier(tmp_path, rest_s=0.2)
    cache = AudioFeatureCache(0, tiers=[tier])
    cache.store_features("key", features())

    def fail(*_, **__):
        raise OSError("Input/output error")

    real, tier._cache.get = tier._cache.get, fail
    begin = time.monotonic()
    assert [cache.retrieve_features("key") for _ in range(50)] == [None] * 50
    assert time.monotonic() - begin < 0.2 and caplog.text.count("left out") == 1
    tier._cache.get = real
    time.sleep(0.25)
    assert cache.retrieve_features("key") is not None


def test_a_full_disk_can_still_be_read(tmp_path, caplog):
    caplog.set_level("INFO", logger="shoal.tiers")
    tier = DiskTier(tmp_path, rest_s=0.2)
    tier.put("early", b"x" * 500)
    room, full = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, room[1]))  # no file may grow: a real error of the system
        for i in range(20):
            tier.put(f"late {i}", bytes(5000))
            full += tier.get("nothing") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert full == 20 and caplog.text.count("disk (writing) is left out") == 1 and "works again" not in caplog.text
    assert tier.get("early") == b"x" * 500 and 1 <= tier.errors < 20
    time.sleep(0.25)
    tier.put("after", b"y")
    assert tier.get("after") == b"y" and caplog.text.count("works again") == 1


def test_processes_and_threads_share_a_directory(tmp_path):
    program = (
        "import sys; from shoal.tiers import DiskTier; t = DiskTier(sys.argv[1]); n = int(sys.argv[2])\n"
        "for i in range(100): t.put(f'{n}-{i}', b'x' * 500); assert t.get(f'{n}-{i}') == b'x' * 500"
    )
    others = [subprocess.Popen([sys.executable, "-c", program, tmp_path, str(n)]) for n in range(2)]
    tier, errors = DiskTier(tmp_path), []

    def work(n):
        try:
            for i in range(50):
                tier.put(f"t{n}-{i}", b"y" * 500)
                assert tier.get(f"t{n}-{i}") == b"y" * 500
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(60) for other in others] == [0, 0] and not errors
    assert len(tier) == 350


def test_speech_is_remembered_across_restarts(checkpoint, tmp_path, monkeypatch):
    def load():
        return FishSpeech.load(checkpoint, device="cpu", cache=AudioFeatureCache(tiers=[DiskTier(tmp_path)]))

    audio = 0.1 * np.random.default_rng(0).standard_normal(44100).astype(np.float32)
    first = load()
    voice = first.voices.encode([(audio, "What is said.")])
    spoken = first.synthesize("Said before the restart.", voice, P)
    second = load()
    with monkeypatch.context() as patch:
        patch.setattr(second._engine, "submit", None)
        patch.setattr(shoal.voices.VoiceStore, "_encode", None)
        again_voice = second.voices.encode([(audio, "What is said.")])
        again = second.synthesize("Said before the restart.", again_voice, P)
    assert again_voice.id == voice.id and again.cache_hit and again.seed == spoken.seed
    np.testing.assert_allclose(again.audio, spoken.audio, atol=1e-6)
    assert not second.synthesize("Said before the restart.", again_voice, P, use_cache=False).cache_hit


def test_a_damaged_voice_is_encoded_again(checkpoint, tmp_path, caplog):
    tier = DiskTier(tmp_path)
    audio = 0.1 * np.random.default_rng(0).standard_normal(44100).astype(np.float32)

    def encode():
        speech = FishSpeech.load(checkpoint, device="cpu", cache=AudioFeatureCache(tiers=[tier]))
        return speech.voices.encode([(audio, "Said."), (audio[::-1].copy(), "And that.")])

    voice = encode()
    (key,) = list(tier._cache.iterkeys())
    assert key.startswith("voice:") and Voice.from_bytes(tier.get(key)).id == voice.id
    for data in (b"nonsense", tier.get(key)[:-1], pack("voice", {"texts": ["one"]}, []), features().to_bytes()):
        tier.put(key, data)
        assert encode().id == voice.id
        assert tier.get(key) == voice.to_bytes()
    assert caplog.text.count("a voice is damaged and removed") == 4
    wrong = pack("voice", {"texts": ["Said."]}, [np.zeros((3, 5))])  # of a codec with other codebooks
    tier.put(key, wrong)
    assert encode().id == voice.id


# -- Redis


@pytest.fixture
def server(tmp_path):
    if redis_server_binary() is None:
        pytest.skip(NO_REDIS)
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def test_workers_share_what_redis_has(server, tmp_path):
    one, other = (AudioFeatureCache(tiers=[RedisTier(server.url)]) for _ in range(2))
    one.store_features("key", features())
    assert same(other.retrieve_features("key"), features())
    assert other.stats().tier_hits == {"redis": 1}
    assert other.retrieve_features("missing") is None
    assert AudioFeatureCache(tiers=[RedisTier(server.url, prefix="other:")]).retrieve_features("key") is None
    disk = DiskTier(tmp_path / "disk")
    third = AudioFeatureCache(tiers=[disk, RedisTier(server.url)])
    third.retrieve_features("key")
    assert disk.get("features:key") == features().to_bytes()  # moved up
    RedisTier(server.url, prefix="other:").clear()
    assert AudioFeatureCache(tiers=[RedisTier(server.url)]).retrieve_features("key") is not None
    one.clear(tiers=True)
    assert AudioFeatureCache(tiers=[RedisTier(server.url)]).retrieve_features("key") is None


def test_damage_and_bombs_in_redis_are_misses(server, caplog):
    tier = RedisTier(server.url)
    for data in (pickle.dumps(Bomb()), features().to_bytes()[:-1], b"x"):
        tier.put("features:key", data)
        assert AudioFeatureCache(tiers=[tier]).retrieve_features("key") is None
        assert tier.get("features:key") is None
    tier._client.lpush("shoal:features:list", b"x")  # not a string at all
    assert tier.get("features:list") is None
    assert caplog.text.count("damaged and removed") == 3 and "left out" not in caplog.text


def test_without_redis_the_work_goes_on_and_comes_back(server, checkpoint, caplog):
    caplog.set_level("INFO", logger="shoal.tiers")
    cache = AudioFeatureCache(tiers=[RedisTier(server.url, rest_s=0.3)])
    speech = FishSpeech.load(checkpoint, device="cpu", cache=cache)
    speech.synthesize("While it is there.", params=P)
    server.stop()
    begin = time.monotonic()
    for i in range(20):
        assert len(speech.synthesize(f"While it is away, {i}.", params=P).audio)
    assert speech.synthesize("While it is away, 3.", params=P).cache_hit  # from memory
    assert time.monotonic() - begin < 60
    server.start()
    time.sleep(0.35)
    speech.synthesize("Now it is back.", params=P)
    fresh = FishSpeech.load(checkpoint, device="cpu", cache=AudioFeatureCache(tiers=[RedisTier(server.url)]))
    assert fresh.synthesize("Now it is back.", params=P).cache_hit
    assert 1 <= caplog.text.count("is left out") <= 3 and caplog.text.count("works again") == 1


def test_a_redis_that_hangs_costs_one_short_wait(server):
    tier = RedisTier(server.url, timeout_s=0.1, rest_s=5.0)
    tier.put("features:key", features().to_bytes())
    server.process.send_signal(signal.SIGSTOP)
    cache = AudioFeatureCache(0, tiers=[tier])
    begin = time.monotonic()
    for i in range(100):
        assert cache.retrieve_features(str(i)) is None
    assert time.monotonic() - begin < 1.0


def test_a_full_redis_refuses_and_still_answers(server):
    tier = RedisTier(server.url)
    tier.put("features:key", features().to_bytes())
    tier._client.config_set("maxmemory", "1mb")
    tier.put("features:other", features(5000).to_bytes())
    assert tier.get("features:key") == features().to_bytes()
    assert tier.get("features:other") is None


def test_entries_in_redis_can_expire(server):
    tier = RedisTier(server.url, ttl_s=0.1)
    tier.put("a", b"x")
    assert tier.get("a") == b"x"
    time.sleep(0.15)
    assert tier.get("a") is None


def test_passwords_do_not_reach_the_log(caplog):
    tier = RedisTier("redis://user:secret@127.0.0.1:1/0", timeout_s=0.1)
    assert tier.get("a") is None
    assert "127.0.0.1:1" in caplog.text and "secret" not in caplog.text
    with pytest.raises(ShoalError) as caught:
        RedisTier("http://user:secret@host")
    assert "secret" not in str(caught.value)
