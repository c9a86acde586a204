"""What the request parser accepts, and what it says about what it does not."""

from __future__ import annotations

import base64
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.errors import RequestError
from shoal.serving.limits import HandlerSettings, Limits, SettingsError, load_settings
from shoal.serving.schema import TTSRequest, parse_request

JSON = "application/json"
OPENAI = "v1/audio/speech"


def parse(fields, **kwargs):
    return parse_request(fields, JSON, None, **kwargs)


def message_of(status, body, content_type=JSON, url_path=None, **kwargs):
    with pytest.raises(RequestError) as caught:
        parse_request(body, content_type, url_path, **kwargs)
    assert caught.value.status == status
    return str(caught.value)


def test_a_body_with_text_alone_gets_upstreams_defaults():
    request = parse({"text": "안녕하세요"})
    assert request.text == "안녕하세요"
    assert (request.format, request.temperature, request.top_p, request.repetition_penalty) == ("wav", 0.7, 0.7, 1.2)
    assert (request.max_new_tokens, request.chunk_length, request.seed, request.streaming) == (1024, 200, None, False)


def test_every_field_of_upstream_is_taken():
    sample = {"audio": base64.b64encode(b"RIFF").decode(), "text": "so I said"}
    request = parse(
        {
            "text": "Hello.",
            "references": [sample],
            "format": "mp3",
            "streaming": True,
            "seed": 7,
            "temperature": 1,
            "top_p": 0.9,
            "repetition_penalty": 1.0,
            "max_new_tokens": 100,
            "chunk_length": 100,
            "normalize": False,
            "use_memory_cache": "off",
            "reference_id": None,
            "mp3_bitrate": 128,
            "latency": "normal",
        }
    )
    assert request.references[0].audio == b"RIFF"
    assert request.references[0].text == "so I said"
    assert request.temperature == 1.0


def test_a_plain_text_body_is_the_text():
    assert parse_request("Good morning.", "text/plain", None).text == "Good morning."
    assert parse_request("좋은 아침".encode(), "text/plain; charset=utf-8", None).text == "좋은 아침"


@pytest.mark.parametrize("content_type", [None, "", "application/json; charset=utf-8", "application/octet-stream"])
def test_json_that_the_server_did_not_decode_is_decoded(content_type):
    assert parse_request(bytearray(b'\xef\xbb\xbf{"text": "Hi"}'), content_type, "v1/tts").text == "Hi"


def test_the_extremes_that_are_allowed():
    assert parse({"text": "a", "temperature": 0}).temperature == 0
    assert parse({"text": "a", "seed": 2**63 - 1}).seed == 2**63 - 1
    assert parse({"text": "a", "seed": 0, "reference_id": "민수 2.1_b-c"}).reference_id == "민수 2.1_b-c"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "'text' is required"),
        ({"text": 5}, "'text' must be a string, not a number"),
        ({"text": None}, "'text' must be a string, not null"),
        ({"text": ["a"]}, "'text' must be a string, not an array"),
        ({"text": ""}, "text is empty"),
        ({"text": " \n\t"}, "text is empty"),
        ({"text": "a\0b"}, "NUL character at position 1"),
        ({"text": "ab\ud83d"}, "surrogate pair (\\ud83d) at position 2"),
        ({"text": "a", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"text": "a", "zzz": 1}, "unknown field 'zzz'; known fields are text"),
        ({"text": "a", "z\ud800": 1}, "not valid Unicode"),
        ({"text": "a", "temperature": -1}, "'temperature'"),
        ({"text": "a", "temperature": math.nan}, "'temperature'"),
        ({"text": "a", "temperature": math.inf}, "'temperature'"),
        ({"text": "a", "temperature": True}, "'temperature'"),
        ({"text": "a", "temperature": "0.7"}, "'temperature'"),
        ({"text": "a", "top_p": 0}, "'top_p'"),
        ({"text": "a", "repetition_penalty": 0}, "'repetition_penalty'"),
        ({"text": "a", "seed": 2**70}, "'seed'"),
        ({"text": "a", "seed": 2**63}, "'seed'"),
        ({"text": "a", "seed": -1}, "'seed'"),
        ({"text": "a", "seed": 1.5}, "'seed'"),
        ({"text": "a", "format": "aac"}, "'wav', 'pcm', 'flac', 'mp3' or 'opus'"),
        ({"text": "a", "sample_rate": 1}, "'sample_rate'"),
        ({"text": "a", "streaming": "yes"}, "'streaming'"),
        ({"text": "a", "max_new_tokens": 10**9}, "'max_new_tokens' must be at most 2048"),
        ({"text": "a", "use_memory_cache": True}, "'on' or 'off'"),
        ({"text": "a", "reference_id": "../../etc/passwd"}, "not a voice name"),
        ({"text": "a", "reference_id": "/etc/passwd"}, "not a voice name"),
        ({"text": "a", "reference_id": "a\n"}, "not a voice name"),
        ({"text": "a", "reference_id": ""}, "not a voice name"),
        ({"text": "a", "reference_id": "a" * 65}, "not a voice name"),
        ({"text": "a", "references": [{"audio": "***", "text": "b"}]}, "'references.0.audio' is not valid base64"),
        ({"text": "a", "references": [{"audio": "", "text": "b"}]}, "'references.0.audio' is empty"),
        ({"text": "a", "references": [{"audio": 5, "text": "b"}]}, "must be a base64 string"),
        ({"text": "a", "references": [{"audio": "aGk="}]}, "'references.0.text' is required"),
        ({"text": "a", "references": [{"audio": "aGk=", "text": "b", "path": "/x"}]}, "'references.0.path'"),
        ({"text": "a", "references": [{"audio": "aGk=", "text": "b"}] * 5}, "4 are allowed"),
        ({"text": "a", "references": [{"audio": "aGk=", "text": "b"}], "reference_id": "c"}, "one of the two"),
    ],
)
def test_what_is_wrong_gets_a_400_that_names_it(fields, said):
    assert said in message_of(400, fields)


def test_too_much_gets_a_413_that_says_how_much_is_allowed():
    limits = Limits(max_reference_bytes=100)
    assert "20000 are allowed" in message_of(413, {"text": "x" * 100_000})
    assert "20000 are allowed" in message_of(413, "x" * 100_000, "text/plain")
    sample = {"audio": base64.b64encode(bytes(60)).decode(), "text": "b"}
    assert "100 are allowed together" in message_of(413, {"text": "a", "references": [sample] * 2}, limits=limits)
    sample = {"audio": "A" * 10_000_000, "text": "b"}
    assert "larger than 100 bytes" in message_of(413, {"text": "a", "references": [sample]}, limits=limits)


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (None, None, "no body"),
        (bytearray(b'{"text": '), JSON, "not valid JSON: Expecting value (line 1, column 10)"),
        (bytearray(b""), JSON, "not valid JSON"),
        (bytearray(b"\xff\xfe\x00"), JSON, "not UTF-8"),
        (bytearray(b"\xff"), "text/plain", "not UTF-8"),
        (b"[" * 100_000, JSON, "too deep"),
        (b"1" * 10_000, JSON, "too long a number"),
        ([{"text": "a"}], JSON, "must be an object, not an array"),
        ("a", JSON, "must be an object, not a string"),
        (b"null", JSON, "must be an object, not null"),
        (b"text=a", "application/x-www-form-urlencoded", "'application/x-www-form-urlencoded' is not read"),
        (b"\x81\xa4text", "application/msgpack", "application/msgpack"),
    ],
)
def test_bodies_that_are_no_request(body, content_type, said):
    assert said in message_of(400, body, content_type)


def test_a_path_that_nothing_serves_is_a_404():
    assert "v1/audio/speech" in message_of(404, {"text": "a"}, url_path="v1/chat/completions")


def test_openais_body_is_translated():
    body = {"input": "Hi.", "voice": "alloy", "model": "tts-1", "instructions": "cheerfully", "speed": 1}
    request = parse_request(body, JSON, OPENAI)
    assert (request.text, request.reference_id, request.format, request.streaming) == ("Hi.", None, "mp3", False)
    assert parse_request(body, JSON, OPENAI, voice_names=["alloy"]).reference_id == "alloy"
    assert parse_request({**body, "voice": "minsu"}, JSON, OPENAI).reference_id == "minsu"


def test_openais_pcm_is_24_khz_and_its_stream_formats_stream():
    pcm = parse_request({"input": "Hi.", "response_format": "pcm", "stream_format": "sse"}, JSON, OPENAI)
    assert (pcm.format, pcm.sample_rate, pcm.streaming, pcm.stream_format) == ("pcm", 24000, True, "sse")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "a", "speed": 4.5}, "less than or equal to 4"),
        ({"input": "a", "response_format": "aac"}, "'mp3'"),
        ({"input": ""}, "input is empty"),
        ({"text": "a"}, "'input' is required"),
        ({"input": "a", "voice": "../x"}, "not a voice name"),
        ("just text", "JSON body"),
    ],
)
def test_openais_body_is_checked_as_strictly(body, said):
    content_type = "text/plain" if isinstance(body, str) else JSON
    assert said in message_of(400, body, content_type, OPENAI)


def test_a_long_wrong_value_is_not_echoed_whole():
    assert len(message_of(400, {"text": "a", "format": "x" * 100_000})) < 400


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.none(),
        st.binary(max_size=200),
        st.text(st.characters(), max_size=50),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from([*TTSRequest.model_fields, "input", "voice", "x"]), inner, max_size=4)
            ),
            max_leaves=8,
        ),
    ),
    st.sampled_from([None, JSON, "text/plain", "x/y"]),
    st.sampled_from([None, OPENAI, "v1/tts", "x"]),
)
def test_whatever_comes_in_the_answer_is_a_request_or_a_request_error(body, content_type, url_path):
    try:
        assert isinstance(parse_request(body, content_type, url_path), TTSRequest)
    except RequestError as error:
        json.dumps(str(error)).encode()  # can be sent


def test_handler_settings_name_the_key_that_is_wrong():
    assert load_settings(None) == HandlerSettings()
    assert load_settings({"limits": {"max_seconds": 5}}).limits.max_seconds == 5.0
    for section, said in (
        ({"max_batchsize": 4}, "handler.max_batchsize"),
        ({"limits": {"max_seconds": -1}}, "handler.limits.max_seconds"),
        ([], "must be a mapping"),
    ):
        with pytest.raises(SettingsError, match=said):
            load_settings(section)
