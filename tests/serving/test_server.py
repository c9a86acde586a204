"""A real TorchServe with the real handler, talked to over HTTP as clients would."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
import soundfile as sf
import yaml
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.control import set_limits
from shoal.serving.server import TorchServe
from shoal.serving.watch import Watch
from shoal.tuning import LimitController

pytestmark = pytest.mark.server

TIMEOUT_S = 180
WARM = "A phrase that is known before the server is ready."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, size="smoke", seed=0)
    return directory


def serve(checkpoint, directory, **overrides):
    archive = build_archive(directory, checkpoint=checkpoint, overrides=overrides)
    # more threads than free cores wait for each other, and the networks are tiny
    server = TorchServe(archive, config=project_root() / "config.properties", env={"OMP_NUM_THREADS": "1"})
    server.start()
    try:
        server.wait_ready(TIMEOUT_S)
    except Exception:
        server.stop()
        raise
    return server


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    limits = {"max_waiting": 8}  # fewer than by default, so that a test can exceed it
    handler = {"limits": limits, "warm_phrases": [WARM]}
    server = serve(checkpoint, tmp_path_factory.mktemp("store"), handler=handler)
    yield server
    server.stop()


def request(text="Hello there.", **fields):
    return {"text": text, "seed": 1, "max_new_tokens": 30, **fields}


def post(server, body, path="", **kwargs):
    return requests.post(server.predict_url + path, json=body, timeout=TIMEOUT_S, **kwargs)


def info(server):
    return requests.get(server.predict_url + "/1.0/v1/info", timeout=TIMEOUT_S).json()


def samples_of(reply):
    assert reply.status_code == 200, reply.text
    with wave.open(io.BytesIO(reply.content)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def lasting(server, seconds, **fields):
    """A request whose audio lasts at least that long (random weights end when they like), and its reply."""
    bodies = [request("A sentence.", **{"max_new_tokens": 60, **fields, "seed": seed}) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda body: post(server, body), bodies))
    return next(
        pair for pair in zip(bodies, replies, strict=True) if float(pair[1].headers["X-Shoal-Audio-Seconds"]) >= seconds
    )


def test_json_in_wav_out_and_the_same_again_from_the_cache(server):
    body = request("The first request.")
    first, second = post(server, body), post(server, body)
    assert first.headers["Content-Type"] == "audio/wav"
    assert int(first.headers["Content-Length"]) == len(first.content)
    seconds = len(samples_of(first)) / 44100
    assert seconds == pytest.approx(float(first.headers["X-Shoal-Audio-Seconds"]), abs=0.001)
    assert np.abs(samples_of(first)).max() > 100
    assert (first.headers["X-Shoal-Cache"], second.headers["X-Shoal-Cache"]) == ("miss", "hit")
    assert first.headers["X-Shoal-Seed"] == "1"
    assert second.content == first.content


def test_phrases_of_the_configuration_are_known_when_the_server_is_ready(server):
    known, new = post(server, {"text": WARM}), post(server, {"text": WARM + " And more."})
    assert (known.headers["X-Shoal-Cache"], new.headers["X-Shoal-Cache"]) == ("hit", "miss")
    assert len(samples_of(known)) > 0


def test_the_live_limit_changes_while_requests_are_worked_on(server):
    most = info(server)["max_batch_size"]
    assert info(server)["batch_limit"] == most
    try:
        set_limits(server.control_file, batch_limit=1, cache_bytes="1MB")
        assert info(server)["batch_limit"] == 1 and info(server)["cache"]["max_bytes"] == 2**20
        bodies = [request(f"Number {i}.", use_memory_cache="off") for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            alone = list(pool.map(lambda body: post(server, body), bodies))
        assert {reply.headers["X-Shoal-Batch-Size"] for reply in alone} == {"1"}
        server.control_file.write_text("{not json")
        assert info(server)["batch_limit"] == 1
    finally:
        server.control_file.unlink()
    assert info(server)["batch_limit"] == most
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: post(server, body), bodies))
    assert max(int(reply.headers["X-Shoal-Batch-Size"]) for reply in together) > 1
    for one, other in zip(alone, together, strict=True):
        assert np.abs(samples_of(one).astype(int) - samples_of(other)).max() <= 1


def test_plain_text_in_any_language(server):
    for text in ("Plain text.", "평범한 글입니다.", "これはテキストです。"):
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        reply = requests.post(server.predict_url, data=text.encode(), headers=headers, timeout=TIMEOUT_S)
        assert len(samples_of(reply)) > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_speed_changes_the_length(server, streaming):
    usual, slow = (post(server, request("Slowly now.", speed=s, format="pcm", streaming=streaming)) for s in (1.0, 0.5))
    assert usual.status_code == slow.status_code == 200
    assert len(slow.content) == pytest.approx(2 * len(usual.content), abs=8)
    body = {"input": "Slowly now.", "voice": "alloy", "response_format": "pcm", "speed": 2, "seed": 1}
    assert post(server, body, path="/1.0/v1/audio/speech").status_code == 200


def test_loudness_is_set(server):
    quiet, loud = (post(server, request("Louder, please.", loudness=level)) for level in (-40, -20))
    assert np.abs(samples_of(loud).astype(int)).max() > 3 * np.abs(samples_of(quiet).astype(int)).max()


@pytest.mark.parametrize("fmt", ["pcm", "flac", "mp3", "opus"])
def test_the_other_formats(server, fmt):
    reply = post(server, request(format=fmt))
    assert reply.status_code == 200
    if fmt != "pcm":
        audio, _ = sf.read(io.BytesIO(reply.content))
        assert len(audio) > 0


def test_a_stream_comes_in_chunks_that_make_up_the_whole(server):
    body, whole = lasting(server, 2.0, format="pcm")
    reply = post(server, {**body, "streaming": True, "use_memory_cache": "off"}, stream=True)
    chunks = list(reply.iter_content(None))
    assert reply.headers["Transfer-Encoding"] == "chunked"
    assert reply.headers["X-Shoal-Seed"] == str(body["seed"])
    assert len(chunks) > 1
    streamed = np.frombuffer(b"".join(chunks), "<i2").astype(int)
    assert np.abs(streamed - np.frombuffer(whole.content, "<i2")).max() <= 2


def test_sixteen_clients_at_once_stream_and_whole_get_what_they_would_get_alone(server):
    def body(i):
        return request(f"Client number {i} speaks.", seed=i, format="pcm", use_memory_cache="off")

    alone = [post(server, body(i)) for i in range(4)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: post(server, {**body(i), "streaming": i % 3 == 2}), range(16)))
    assert [reply.status_code for reply in replies] == [200] * 16
    assert all(reply.content for reply in replies)
    for i, expected in enumerate(alone):
        got, want = (np.frombuffer(r.content, "<i2").astype(int) for r in (replies[i], expected))
        assert len(got) == len(want) and np.abs(got - want).max() <= 2
    sizes = [int(reply.headers["X-Shoal-Batch-Size"]) for reply in replies if "X-Shoal-Batch-Size" in reply.headers]
    assert max(sizes) > 4


def test_openais_route_plain_and_as_events(server):
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello.", "seed": 1}
    whole = post(server, body, "/1.0/v1/audio/speech")
    assert (whole.status_code, whole.headers["Content-Type"]) == (200, "audio/mpeg")
    events = post(server, {**body, "stream_format": "sse", "response_format": "pcm"}, "/1.0/v1/audio/speech")
    assert events.headers["Content-Type"] == "text/event-stream"
    kinds = [json.loads(line[6:])["type"] for line in events.text.strip().split("\n\n")]
    assert kinds[0] == "speech.audio.delta" and kinds[-1] == "speech.audio.done"


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(200)).decode()
JSON = "application/json"
BAD = {
    "empty text": (b'{"text": ""}', JSON, {400}),
    "empty body": (b"", JSON, {400}),
    "100,000 characters": (json.dumps({"text": "word " * 20_000}).encode(), JSON, {413}),
    "only emoji": ('{"text": "🎉🎉🎉"}'.encode(), JSON, {200, 400}),
    "NUL bytes": (b'{"text": "a\\u0000b"}', JSON, {400}),
    "NUL bytes in plain text": (b"a\x00b", "text/plain", {400}),
    "lone surrogate": (b'{"text": "a\\ud800"}', JSON, {400}),
    "text is a number": (b'{"text": 5}', JSON, {400}),
    "unknown field": (b'{"text": "a", "speed_up": 2}', JSON, {400}),
    "temperature 0": (b'{"text": "a", "temperature": 0, "max_new_tokens": 5}', JSON, {200}),
    "temperature NaN": (b'{"text": "a", "temperature": NaN}', JSON, {400}),
    "temperature -1": (b'{"text": "a", "temperature": -1}', JSON, {400}),
    "seed 2**70": (json.dumps({"text": "a", "seed": 2**70}).encode(), JSON, {400}),
    "no base64": (b'{"text": "a", "references": [{"audio": "!!!", "text": "b"}]}', JSON, {400}),
    "a reference that is a PNG": (
        json.dumps({"text": "a", "references": [{"audio": PNG, "text": "b"}]}).encode(),
        JSON,
        {400},
    ),
    "a path as reference_id": (b'{"text": "a", "reference_id": "../../etc/passwd"}', JSON, {400}),
    "an unknown reference_id": (b'{"text": "a", "reference_id": "nobody"}', JSON, {400}),
    "invalid JSON": (b'{"text": ', JSON, {400}),
    "JSON that is a list": (b'["a"]', JSON, {400}),
    "JSON nested deep": (b"[" * 50_000, JSON, {400}),
    "not UTF-8": (b"\xff\xfe", "text/plain", {400}),
    "form encoding": (b"text=hello", "application/x-www-form-urlencoded", {400}),
    "msgpack": (b"\x81\xa4text\xa5hello", "application/msgpack", {400}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_json_error_and_the_next_request_works(server, case):
    body, content_type, allowed = BAD[case]
    reply = requests.post(server.predict_url, data=body, headers={"Content-Type": content_type}, timeout=TIMEOUT_S)
    assert reply.status_code in allowed
    if reply.status_code != 200:
        error = reply.json()
        assert error["code"] == reply.status_code
        assert len(error["message"]) > 10
        assert "Traceback" not in reply.text and "site-packages" not in reply.text
    assert post(server, request()).status_code == 200


def test_a_body_of_50_mb_is_refused_and_the_next_request_works(server):
    body = b'{"text": "' + b"a" * 50_000_000 + b'"}'
    reply = requests.post(server.predict_url, data=body, headers={"Content-Type": JSON}, timeout=TIMEOUT_S)
    assert (reply.status_code, reply.json()["code"]) == (413, 413)
    assert post(server, request()).status_code == 200


def test_a_body_over_torchserves_limit_is_refused_and_the_next_request_works(server):
    try:
        reply = requests.post(server.predict_url, data=b"a" * 70_000_000, timeout=TIMEOUT_S)
        assert reply.status_code == 413  # from TorchServe's front, before any handler, and without a body
    except requests.ConnectionError:
        pass  # the server may hang up while the client still sends
    assert post(server, request()).status_code == 200


def test_a_path_that_nothing_serves_is_a_404(server):
    reply = post(server, request(), "/1.0/v1/chat/completions")
    assert (reply.status_code, reply.json()["code"]) == (404, 404)


def test_a_reference_recording_changes_the_voice(server):
    noise = np.random.default_rng(0).normal(0, 0.1, 16000)
    recording = io.BytesIO()
    sf.write(recording, noise, 16000, format="FLAC")
    sample = {"audio": base64.b64encode(recording.getvalue()).decode(), "text": "hush"}
    plain, voiced = post(server, request()), post(server, request(references=[sample]))
    assert voiced.status_code == 200
    assert voiced.content != plain.content


def test_bad_requests_do_not_touch_their_batch_mates(server):
    bodies = [request(f"Mate {i}.", use_memory_cache="off") if i % 2 else {"text": i} for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda body: post(server, body), bodies))
    assert [reply.status_code for reply in replies] == [400, 200] * 6


def test_a_streaming_client_that_hangs_up_frees_its_row(server):
    body = request("A long text, it goes on. " * 200, streaming=True, use_memory_cache="off", chunk_length=50)
    reply = post(server, body, stream=True)
    chunks = reply.iter_content(None)  # held, since the connection closes with it
    next(chunks)
    told = info(server)
    assert told["live"] + told["waiting"] > 0
    reply.close()
    deadline = time.monotonic() + 10
    while info(server)["live"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert info(server)["live"] == info(server)["waiting"] == 0


def test_what_is_too_much_is_told_to_come_back_at_once_and_the_rest_is_served(server):
    bodies = [request(f"One of too many, {i}.", seed=i, use_memory_cache="off") for i in range(40)]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda body: post(server, body), bodies))
    turned_away = [reply for reply in replies if reply.status_code == 503]
    assert 0 < len(turned_away) <= 16
    assert all(reply.headers["Retry-After"] == "2" and reply.json()["type"] == "overloaded" for reply in turned_away)
    assert [reply.status_code for reply in replies].count(200) == 40 - len(turned_away)


def test_a_watch_sees_what_the_server_does_and_its_limit_follows_the_load(server):
    set_limits(server.control_file, batch_limit=1)
    controller = LimitController(1, most=4, p95_s=0.01, rest=2)  # a bound that no load meets: the limit must rise
    stop, seen = threading.Event(), []

    def client(i):
        while not stop.is_set():
            assert post(server, request(f"Text {i}.", use_memory_cache="off")).status_code == 200

    with Watch(server.url, every_s=0.3, on_point=seen.append) as watch, ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, i) for i in range(6)]
        watch.follow(controller, server.control_file)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (watch.points and watch.points[-1].batch_limit == 4):
            time.sleep(0.1)
        stop.set()
        for done in clients:
            done.result(TIMEOUT_S)
        watch.follow(None)
    assert watch.error is None and seen == watch.points
    limits = [point.batch_limit for point in seen]
    assert limits[-1] == 4 and limits == sorted(limits) and set(limits) <= {1, 2, 4}, "it rises, a step at a time"
    last = seen[-1]
    assert last.requests > 0 and 0 < last.p50_s <= last.p95_s and last.texts_per_s > 0 and last.live <= 4
    set_limits(server.control_file, batch_limit=None)


@pytest.mark.slow
def test_a_reply_above_torchserves_default_of_6_5_mb_arrives(server):
    text = " ".join(f"This is sentence number {i}, and it is a short one." for i in range(100))
    reply = post(server, request(text, sample_rate=48000, chunk_length=50, max_new_tokens=40))
    assert len(samples_of(reply)) * 2 > 6_553_500
    assert post(server, request()).status_code == 200


def test_it_tells_about_itself_and_counts(server):
    told = info(server)
    assert told["engine"] == "shoal" and told["max_batch_size"] == 16
    assert told["cache"]["tiers"] == ["memory"] and told["cache"]["misses"] > 0 and told["precision"] == "float32"


def test_every_declared_metric_is_scraped(server):
    config = yaml.safe_load((project_root() / "handler" / "metrics.yaml").read_text(encoding="utf-8"))
    names = {
        m["name"] for metrics in config["model_metrics"].values() for m in metrics if m["name"].startswith("shoal")
    }
    assert len(names) > 15
    bodies = [request("Counted."), request("Counted."), {"text": ""}]  # decoded, remembered, refused
    deadline = time.monotonic() + 20
    while True:
        for body in bodies:  # states are told once a second, by a call that has work
            post(server, body)
        text = requests.get(server.metrics_url, timeout=10).text
        samples = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        missing = {name for name in names if name not in samples and f"{name}_bucket" not in samples}
        if not missing:
            break
        assert time.monotonic() < deadline, missing
    assert re.search(r'shoal_requests_total\{ModelName="fish_speech",Outcome="rejected",Status="400"', text)
    assert re.search(r'shoal_cache_tier_hits_total\{ModelName="fish_speech",Tier="memory".*\} [1-9]', text)
    assert re.search(r"shoal_frames_total\{.*\} [1-9]", text)


def test_the_log_has_a_json_line_per_request_and_no_text(server):
    secret = "Nobody may read this."
    assert post(server, request(secret)).status_code == 200
    assert post(server, request(secret, temperature=99)).status_code == 400
    deadline = time.monotonic() + 10
    while True:
        log = (server.log_dir / "model_log.log").read_text(encoding="utf-8")
        found = [
            json.loads(line[line.index('{"event"') :]) for line in log.splitlines() if '{"event": "request"' in line
        ]
        if {"ok", "rejected"} <= {record["outcome"] for record in found if record["seconds"] >= 0}:
            break
        assert time.monotonic() < deadline, log[-2000:]
        time.sleep(0.5)
    assert secret not in log
    ok = next(record for record in reversed(found) if record["outcome"] == "ok")
    assert ok["status"] == 200 and ok["characters"] == len(secret) and ok["request_id"] and ok["audio_seconds"] > 0
    assert next(r for r in reversed(found) if r["outcome"] == "rejected")["error"] == "invalid_request_error"


def test_classic_mode_answers_a_batch_in_one_call(checkpoint, tmp_path):
    server = serve(checkpoint, tmp_path, continuousBatching=False, maxBatchDelay=200, batchSize=8)
    try:
        bodies = [request(f"Classic {i}.", seed=i, streaming=i == 3) for i in range(5)] + [
            {"text": 5},
            request("🎉 ok"),
        ]
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda body: post(server, body), bodies))
        assert [reply.status_code for reply in replies] == [200] * 5 + [400, 200]
        assert replies[5].json()["type"] == "invalid_request_error"
        assert max(int(reply.headers["X-Shoal-Batch-Size"]) for reply in replies[:5]) > 1
        assert post(server, bodies[0]).headers["X-Shoal-Cache"] == "hit"
    finally:
        server.stop()
