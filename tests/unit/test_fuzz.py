"""Ten thousand inputs that nobody would send: each is taken or refused in words, and nothing else happens.

SHOAL_FUZZ=20 runs twenty times as many.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os

import numpy as np
import soundfile as sf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.errors import RequestError
from shoal.serving.audio import decode_reference
from shoal.serving.limits import Limits
from shoal.serving.schema import OpenAISpeechRequest, TTSRequest, parse_request

TIMES = int(os.environ.get("SHOAL_FUZZ", "1"))
LIMITS = Limits(max_text_chars=500, max_reference_bytes=20_000)
FIELDS = [*TTSRequest.model_fields, *OpenAISpeechRequest.model_fields]
PATHS = ("", "v1/tts", "v1/audio/speech", "v1/info", "../etc/passwd", "v1/audio/speech/")
TYPES = ("application/json", "text/plain", "text/plain; charset=utf-16", "", "multipart/form-data", "application/x")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(FIELDS)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)
objects = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=10), values, max_size=6)


def fuzz(examples):
    return settings(
        max_examples=examples * TIMES, deadline=None, derandomize=TIMES == 1, suppress_health_check=list(HealthCheck)
    )


def taken_or_refused(body, content_type, path):
    try:
        request = parse_request(body, content_type, path, LIMITS, ("anna",))
    except RequestError as error:
        assert 400 <= error.status < 500 and str(error)
        str(error).encode("utf-8")
        assert len(str(error)) < 5000
    else:
        assert isinstance(request, TTSRequest) and request.text.strip() and len(request.text) <= 500
        assert 0.25 <= request.speed <= 4 and 0 <= request.temperature <= 2


@fuzz(2000)
@given(objects | values, st.sampled_from(TYPES), st.sampled_from(PATHS))
def test_json_bodies(body, content_type, path):
    taken_or_refused(body, content_type, path)


@fuzz(3700)
@given(st.binary(max_size=200), st.sampled_from(TYPES), st.sampled_from(PATHS) | st.text(max_size=20))
def test_bytes(body, content_type, path):
    taken_or_refused(body, content_type, path)


@fuzz(800)
@given(objects, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=5), st.sampled_from(PATHS))
def test_damaged_json(body, damage, path):
    raw = bytearray(json.dumps({"text": "Hello.", **body}).encode())
    for place, byte in damage:
        raw[place % len(raw)] = byte
    taken_or_refused(bytes(raw), "application/json", path)


@functools.cache
def recording(container, subtype):
    file = io.BytesIO()
    sound = (0.1 * np.random.default_rng(0).standard_normal(4000)).astype(np.float32)
    sf.write(file, sound, 8000, format=container, subtype=subtype)
    return file.getvalue()


KINDS = [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_24")]


@fuzz(2000)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.integers(0, 80) | st.integers(0, 20_000), st.integers(0, 255)), max_size=12),
    st.integers(0, 20_000) | st.none(),
)
def test_damaged_recordings(kind, damage, cut):
    raw = bytearray(recording(*kind))
    for place, byte in damage:
        raw[place % len(raw)] = byte
    heard_or_refused(bytes(raw[:cut]))


@fuzz(1500)
@given(st.sampled_from([b"RIFF", b"fLaC", b"OggS", b"ID3\x03", b"FORM", b"caff", b""]), st.binary(max_size=300))
def test_bytes_that_are_no_recording(head, rest):
    heard_or_refused(head + rest)


def heard_or_refused(raw):
    try:
        audio = decode_reference(raw, 44100, 10.0, LIMITS.max_reference_bytes)
    except RequestError as error:
        assert 400 <= error.status < 500 and str(error)
    else:
        assert audio.dtype == np.float32 and audio.ndim == 1 and np.isfinite(audio).all() and len(audio) <= 441_000 + 1
    body = {"text": "a", "references": [{"audio": base64.b64encode(raw).decode(), "text": "b"}]}
    taken_or_refused(body, "application/json", "")
