"""What docs/security.md promises of a real server: tokens, no way to register models, nothing listening outside."""

from __future__ import annotations

import pickle
import socket

import openai
import psutil
import pytest
import requests
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.server import TorchServe

pytestmark = pytest.mark.server

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    archive = build_archive(tmp_path_factory.mktemp("store"), checkpoint=checkpoint)
    config, tokens = project_root() / "config.properties", {"disable_token_authorization": "false"}
    with TorchServe(archive, config=config, overrides=tokens, env={"OMP_NUM_THREADS": "1"}) as running:
        running.wait_ready(180)
        yield running


def ask(server, token=None, **kwargs):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"text": "Hello.", "max_new_tokens": 10}
    return requests.post(server.predict_url, json=body, headers=headers, timeout=TIMEOUT_S, **kwargs)


def test_only_the_right_token_opens(server):
    assert set(server.tokens) >= {"inference", "management"}
    for wrong in (None, "wrong", server.tokens["management"]):
        refused = ask(server, wrong)
        assert 400 <= refused.status_code < 500 and not refused.content.startswith(b"RIFF")
    assert ask(server, server.tokens["inference"]).content.startswith(b"RIFF")


def test_openais_client_carries_the_token_as_its_key(server):
    url = server.predict_url + "/1.0/v1"
    speak = {"model": "tts-1", "voice": "alloy", "input": "Hello.", "response_format": "wav"}
    with openai.OpenAI(base_url=url, api_key=server.tokens["inference"], max_retries=0) as client:
        assert client.audio.speech.create(**speak).content.startswith(b"RIFF")
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client, pytest.raises(openai.APIStatusError):
        client.audio.speech.create(**speak)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/evil.mar", "file:///etc/passwd", "evil.mar"])
def test_no_model_can_be_registered_or_removed(server, url):
    headers = {"Authorization": f"Bearer {server.tokens['management']}"}
    for method, path in (("POST", f"/models?url={url}"), ("DELETE", f"/models/{server.name}")):
        reply = requests.request(method, server.management_url + path, headers=headers, timeout=TIMEOUT_S)
        assert reply.status_code >= 400, (method, path)
    assert ask(server, server.tokens["inference"]).status_code == 200


def test_everything_listens_on_loopback_only(server):
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening and {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}
    assert socket.gethostbyname("localhost") == "127.0.0.1"


def test_a_body_that_is_a_pickle_is_only_bytes(server, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    key, body = server.tokens["inference"], pickle.dumps(Payload())
    for kind in ("application/octet-stream", "application/x-pickle", "application/json"):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        assert requests.post(server.predict_url, data=body, headers=headers, timeout=TIMEOUT_S).status_code == 400
    assert not (tmp_path / "ran").exists()
