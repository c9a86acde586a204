"""The step loop that a server drives: what each request is told, and that none of them touches another."""

from __future__ import annotations

import base64
import io
import json
import logging
import wave

import numpy as np
import pytest
import soundfile as sf
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.limits import HandlerSettings, Limits
from shoal.serving.replies import error_reply, presentable
from shoal.serving.service import SpeechService
from shoal.speech import FishSpeech

JSON = "application/json"
OPENAI = "v1/audio/speech"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smoke")
    write_random_checkpoint(directory, size="smoke", seed=0)
    return FishSpeech.load(directory, device="cpu", max_batch_size=4, threads=1)


@pytest.fixture
def service(model):
    model.cache.clear()
    return SpeechService(model)


def body(text="Hello there.", **fields):
    return {"text": text, "seed": 1, "max_new_tokens": 20, **fields}


def drive(service, most=5000):
    """Run until nobody waits; every reply by request id, in order."""
    replies = {}
    for _ in range(most):
        if not service.pending:
            return replies
        service.run_slice(0.01)
        for request_id, reply in service.collect().items():
            replies.setdefault(request_id, []).append(reply)
    raise AssertionError("requests are still pending")


def only(service, *args, **kwargs):
    service.admit("only", *args, **kwargs)
    (reply,) = drive(service)["only"]
    assert reply.final
    return reply


def error_of(reply):
    return json.loads(reply.body)


def pcm_of(wav):
    with wave.open(io.BytesIO(wav)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def recording(seconds=1.0, rate=16000):
    out = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, int(seconds * rate))
    sf.write(out, noise, rate, format="WAV")
    return base64.b64encode(out.getvalue()).decode()


def test_a_request_is_answered_with_audio_and_what_it_took(service, model):
    reply = only(service, body(), JSON)
    assert (reply.status, reply.content_type, reply.stream) == (200, "audio/wav", False)
    samples = pcm_of(reply.body)
    assert len(samples) / model.sample_rate == pytest.approx(float(reply.headers["X-Shoal-Audio-Seconds"]), abs=0.001)
    assert np.abs(samples).max() > 0
    assert reply.headers["X-Shoal-Cache"] == "miss"
    assert reply.headers["X-Shoal-Seed"] == "1"
    assert reply.headers["X-Shoal-Batch-Size"] == "1"
    assert float(reply.headers["X-Shoal-Time-Ms"]) > 0


def test_the_same_request_again_comes_from_the_cache_and_sounds_the_same(service):
    first, second = only(service, body(), JSON), only(service, body(), JSON)
    assert [first.headers["X-Shoal-Cache"], second.headers["X-Shoal-Cache"]] == ["miss", "hit"]
    assert second.body == first.body


def test_a_request_may_stay_out_of_the_cache(service):
    replies = [only(service, body(use_memory_cache="off"), JSON) for _ in range(2)]
    assert [reply.headers["X-Shoal-Cache"] for reply in replies] == ["miss", "miss"]


def test_requests_decode_together_and_sound_as_they_do_alone(service):
    texts = ["One.", "Two, and a bit more.", "셋입니다.", "四。", "Five!", "Six?"]
    alone = [only(service, body(text, use_memory_cache="off"), JSON).body for text in texts]
    for i, text in enumerate(texts):
        service.admit(f"r{i}", body(text, use_memory_cache="off"), JSON)
    replies = drive(service)
    for i, wav in enumerate(alone):
        # same codes, hence same length; the codec's rounding depends on the batch, which may move a sample by one step
        np.testing.assert_allclose(
            pcm_of(replies[f"r{i}"][0].body).astype(int), pcm_of(wav).astype(int), atol=1, rtol=0
        )
    assert max(int(replies[f"r{i}"][0].headers["X-Shoal-Batch-Size"]) for i in range(len(texts))) == 4


def test_a_bad_request_gets_its_own_error_and_its_mates_their_audio(service):
    service.admit("good", body(), JSON)
    service.admit("bad", body(temperature=-1), JSON)
    service.admit("emoji", body("🎉🎉"), JSON)
    service.admit("also good", "Plain text.", "text/plain")
    service.admit("unknown voice", body(reference_id="nobody"), JSON)
    replies = {request_id: parts[0] for request_id, parts in drive(service).items()}
    assert replies["good"].status == replies["also good"].status == 200
    assert error_of(replies["bad"])["code"] == replies["bad"].status == 400
    assert "temperature" in error_of(replies["bad"])["message"]
    assert error_of(replies["bad"])["type"] == "invalid_request_error"
    assert replies["emoji"].status in (200, 400)
    assert replies["unknown voice"].status == 400
    assert "nobody" in error_of(replies["unknown voice"])["message"]
    outcomes = {record.request_id: (record.outcome, record.status) for record in service.take_records()}
    assert outcomes["good"] == ("ok", 200)
    assert outcomes["bad"] == ("rejected", 400)


@pytest.mark.parametrize("fmt", ["wav", "pcm", "flac", "mp3", "opus"])
def test_every_format_comes_whole_and_streamed(service, fmt):
    whole = only(service, body(format=fmt), JSON)
    service.admit("s", body(format=fmt, streaming=True, use_memory_cache="off"), JSON)
    parts = drive(service)["s"]
    assert whole.status == parts[0].status == 200
    assert whole.content_type == parts[0].content_type
    assert whole.body and b"".join(part.body for part in parts)


def lasting(service, seconds, **fields):
    """A request whose audio lasts at least that long (random weights end when they like), and its reply."""
    for seed in range(50):
        request = body(**{"max_new_tokens": 100, "format": "pcm", **fields, "seed": seed})
        reply = only(service, request, JSON)
        if float(reply.headers["X-Shoal-Audio-Seconds"]) >= seconds:
            return request, reply
    raise AssertionError("no seed speaks for so long")


def test_a_stream_arrives_in_parts_that_make_up_the_whole(service):
    text = "This one is somewhat longer. It has more than one sentence. And here is the third one."
    request, whole = lasting(service, 2.0, text=text, chunk_length=50)
    service.admit("s", {**request, "streaming": True, "use_memory_cache": "off"}, JSON)
    parts = drive(service)["s"]
    with_sound = [part for part in parts if part.body]
    assert len(with_sound) > 1
    assert all(part.stream for part in parts)
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    streamed = np.frombuffer(b"".join(part.body for part in parts), "<i2").astype(int)
    expected = np.frombuffer(whole.body, "<i2").astype(int)
    assert len(streamed) == len(expected)
    assert np.abs(streamed - expected).max() <= 2  # rounding: a piece is decoded with a limited past


def test_a_streamed_wav_starts_with_its_header_and_a_hit_comes_in_one_piece(service):
    service.admit("s", body(streaming=True, max_new_tokens=60), JSON)
    parts = drive(service)["s"]
    assert parts[0].body[:4] == b"RIFF"
    service.admit("hit", body(streaming=True, max_new_tokens=60), JSON)
    hit = drive(service)["hit"]
    assert hit[0].headers["X-Shoal-Cache"] == "hit"


def test_a_stream_in_a_transport_without_streams_is_answered_whole(service):
    reply = only(service, body(streaming=True), JSON, may_stream=False)
    assert (reply.status, reply.stream) == (200, False)
    assert len(pcm_of(reply.body)) > 0


def test_openais_events_carry_the_audio(service):
    service.admit(
        "s", {"input": "Hi there.", "response_format": "wav", "stream_format": "sse", "seed": 1}, JSON, OPENAI
    )
    parts = drive(service)["s"]
    assert parts[0].content_type == "text/event-stream"
    lines = b"".join(part.body for part in parts).decode().strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * (len(events) - 1) + ["speech.audio.done"]
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert audio[:4] == b"RIFF"
    assert events[-1]["usage"]["output_tokens"] > 0


def test_openais_clients_find_their_error_object(service):
    reply = only(service, {"input": "", "voice": "alloy"}, JSON, OPENAI)
    assert reply.status == 400
    assert error_of(reply)["error"]["message"] == error_of(reply)["message"]


def test_a_reference_recording_is_spoken_like(service):
    plain = only(service, body(), JSON)
    voiced = only(service, body(references=[{"audio": recording(), "text": "noise"}]), JSON)
    assert voiced.status == 200
    assert voiced.body != plain.body


def test_bad_references_are_told_apart(service):
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()
    reply = only(service, body(references=[{"audio": png, "text": "x"}]), JSON)
    assert (reply.status, "not a sound file" in error_of(reply)["message"]) == (400, True)
    long = [{"audio": recording(40), "text": "x"}] * 2
    reply = only(service, body(references=long), JSON)
    assert (reply.status, error_of(reply)["type"]) == (413, "too_large")


def test_a_request_past_its_time_is_a_504_and_leaves_no_rows_behind(model):
    now = [0.0]
    service = SpeechService(model, HandlerSettings(limits=Limits(max_seconds=10)), clock=lambda: now[0])
    service.admit("slow", body("A long text, " * 50, use_memory_cache="off", max_new_tokens=500), JSON)
    service.run_slice(0)
    assert service.describe()["live"] > 0
    now[0] = 11.0
    service.run_slice(0)
    (reply,) = service.collect().values()
    assert (reply.status, error_of(reply)["type"]) == (504, "timeout")
    assert service.describe()["live"] == 0 and not service.pending


def test_a_stream_past_its_time_ends(model):
    now = [0.0]
    service = SpeechService(model, HandlerSettings(limits=Limits(max_seconds=10)), clock=lambda: now[0])
    text = "A long text, which goes on and on for quite some time. " * 20
    service.admit("s", body(text, use_memory_cache="off", streaming=True, max_new_tokens=100), JSON)
    for _ in range(1000):
        service.run_slice(0)
        if service.collect():
            break
    now[0] = 11.0
    service.run_slice(0)
    (part,) = service.collect().values()
    assert part.final and part.stream
    assert not service.pending


def test_a_client_that_left_frees_its_rows_at_once(service):
    service.admit("gone", body("Some text. " * 30, use_memory_cache="off"), JSON)
    service.run_slice(0)
    assert service.describe()["live"] > 0
    service.cancel("gone")
    assert service.describe()["live"] == 0
    assert not service.pending and service.collect() == {}
    assert [record.outcome for record in service.take_records()] == ["cancelled"]
    service.cancel("never known")


def test_more_than_may_wait_are_told_to_come_back(model):
    service = SpeechService(model, HandlerSettings(limits=Limits(max_waiting=1, retry_after_s=7)))
    for i in range(model.max_batch_size + 2):
        service.admit(f"r{i}", body(use_memory_cache="off"), JSON)
    replies = drive(service)
    last = replies[f"r{model.max_batch_size + 1}"][0]
    assert (last.status, last.headers["Retry-After"], error_of(last)["type"]) == (503, "7", "overloaded")
    assert [parts[0].status for parts in replies.values()].count(200) == model.max_batch_size + 1


def test_the_unexpected_becomes_an_id_and_not_a_stack_trace(caplog):
    with caplog.at_level(logging.ERROR):
        reply = error_reply(presentable(RuntimeError("secret at /home/me"), "r1"))
    message = error_of(reply)["message"]
    assert reply.status == 500
    assert "secret" not in message and "Traceback" not in message
    error_id = message.split()[2].rstrip(";")
    assert error_id in caplog.text and "secret at /home/me" in caplog.text


def test_running_out_of_memory_is_a_507():
    assert presentable(MemoryError(), "r1").status == 507


def test_the_frames_of_a_request_are_bounded(model):
    service = SpeechService(model, HandlerSettings(limits=Limits(max_new_tokens=5)))
    reply = only(service, {"text": "Hello.", "seed": 1, "use_memory_cache": "off"}, JSON)
    assert float(reply.headers["X-Shoal-Audio-Seconds"]) < 0.5


def test_it_describes_itself_in_json(service, model):
    told = json.loads(only(service, None, None, "v1/info").body)
    assert told["checkpoint"] == model.fingerprint
    assert told["max_batch_size"] == 4
    assert told["limits"]["max_seconds"] == 300.0


def test_records_hold_the_times_of_a_stream(service):
    service.admit("s", body("One sentence. And another sentence.", streaming=True, max_new_tokens=60), JSON)
    drive(service)
    (record,) = service.take_records()
    assert record.outcome == "ok"
    assert 0 < record.first_audio_s <= record.seconds
    assert record.real_time_factor == pytest.approx(record.seconds / record.audio_seconds)
