"""The clients that people have: OpenAI's own package, and whatever the OpenAPI file allows, against a real server."""

from __future__ import annotations

import io

import numpy as np
import openai
import pytest
import requests
import schemathesis
import soundfile as sf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.openapi import openapi
from shoal.serving.server import TorchServe

pytestmark = pytest.mark.server

TIMEOUT_S = 120
SCHEMA = schemathesis.openapi.from_dict(openapi())
SPEAK = "/predictions/fish_speech"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    limits = {"max_new_tokens": 12, "max_text_chars": 400}  # short sounds: what is tested is how they are asked for
    archive = build_archive(
        tmp_path_factory.mktemp("store"), checkpoint=checkpoint, overrides={"handler": {"limits": limits}}
    )
    with TorchServe(archive, config=project_root() / "config.properties", env={"OMP_NUM_THREADS": "1"}) as running:
        running.wait_ready(180)
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.predict_url + "/1.0/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S) as it:
        yield it


@pytest.mark.parametrize("fmt", ["wav", "mp3", "flac", "opus", "pcm"])
def test_openais_client_gets_every_format(client, fmt):
    whole = client.audio.speech.create(model="tts-1", voice="alloy", input="Good morning.", response_format=fmt)
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="Good morning.", response_format=fmt, stream_format="audio"
    ) as streamed:
        pieces = list(streamed.iter_bytes())
        assert streamed.headers["content-type"] == whole.response.headers["content-type"]
    for content in (whole.content, b"".join(pieces)):
        if fmt == "pcm":
            sound, rate = np.frombuffer(content, "<i2") / 32768, 24000
        else:
            sound, rate = sf.read(io.BytesIO(content))
        assert len(sound) / rate > 0.03 and np.abs(sound).max() > 0.001


def test_openais_client_reads_events(client):
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="Good morning.", response_format="pcm", stream_format="sse"
    ) as events:
        lines = [line for line in events.iter_lines() if line]
    assert any("speech.audio.delta" in line for line in lines) and "speech.audio.done" in lines[-1]


def test_openais_client_understands_refusals(client):
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.audio.speech.create(model="tts-1", voice="alloy", input=" ")
    with pytest.raises(openai.BadRequestError, match="nobody"):
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
    with pytest.raises(openai.APIStatusError, match="characters") as too_long:
        client.audio.speech.create(model="tts-1", voice="alloy", input="a" * 500)
    assert too_long.value.status_code == 413
    assert client.audio.speech.create(model="tts-1", voice="alloy", input="Hello.", speed=2).content


@pytest.mark.parametrize("path", [SPEAK, SPEAK + "/1.0/v1/audio/speech"])
def test_what_the_openapi_file_allows_is_answered_as_it_says(server, path):
    documented = {int(code) for code in openapi()["paths"][path]["post"]["responses"]}

    @given(case=SCHEMA[path]["POST"].as_strategy())
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def every_request(case):
        reply = case.call(base_url=server.url, timeout=TIMEOUT_S)
        assert reply.status_code in documented, reply.text
        assert reply.status_code < 500, reply.text
        if reply.status_code != 200:
            fields = reply.json()
            assert fields["code"] == reply.status_code and fields["type"] and fields["message"]
            assert "Traceback" not in reply.text and "/" + "site-packages" not in reply.text

    every_request()


@given(text=st.text(min_size=1, max_size=60))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_text_is_spoken_or_refused_in_words(server, text):
    reply = requests.post(server.predict_url, json={"text": text, "seed": 1}, timeout=TIMEOUT_S)
    assert reply.status_code in (200, 400)
    assert reply.content.startswith(b"RIFF") if reply.status_code == 200 else reply.json()["message"]
