"""A server knows its phrases before the first request: by its configuration, by `shoal warm`, and by kept sound."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from shoal.errors import ShoalError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.caches import open_cache, read_phrases, warm_phrases
from shoal.serving.limits import HandlerSettings, SettingsError, load_settings
from shoal.serving.service import SpeechService
from shoal.speech import FishSpeech
from shoal.tiers import DiskTier, RedisTier
from typer.testing import CliRunner

HANDLER = Path(__file__).parents[2] / "handler" / "fish_speech_handler.py"
JSON = "application/json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def model(checkpoint):
    return FishSpeech.load(checkpoint, device="cpu", max_batch_size=4)


def ask(service, **body):
    service.admit("r", body, JSON)
    while service.pending:
        service.run_slice()
        for reply in service.collect().values():
            if reply.final:
                return reply
    raise AssertionError("no reply")


def test_warmed_phrases_are_hits_for_plain_requests(model):
    service = SpeechService(model)
    done = service.warm(["Hello.", "Please hold the line.", "", "Hello."])
    assert (done.decoded, done.known, list(done.failed)) == (2, 1, [""])
    assert ask(service, text="Please hold the line.").headers["X-Shoal-Cache"] == "hit"
    assert ask(service, text="Please hold the line.", use_memory_cache="off").headers["X-Shoal-Cache"] == "miss"
    assert ask(service, text="Please hold the line.", temperature=0.5).headers["X-Shoal-Cache"] == "miss"
    assert list(service.warm(["Hello."], ["nobody"]).failed) == ["Hello."]


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "pcm"])
def test_kept_replies_are_given_at_once_and_alike(model, monkeypatch, audio_format):
    service = SpeechService(model, HandlerSettings(audio_cache_bytes=10_000_000))
    first = ask(service, text="Say it again.", format=audio_format)
    with monkeypatch.context() as patch:
        patch.setattr(model.scheduler, "step", None)  # no step is needed
        again = ask(service, text="Say it again.", format=audio_format)
    assert again.body == first.body and again.content_type == first.content_type
    assert again.headers["X-Shoal-Cache"] == "hit" and first.headers["X-Shoal-Cache"] == "miss"
    for name in ("X-Shoal-Seed", "X-Shoal-Audio-Seconds"):
        assert again.headers[name] == first.headers[name]
    other = ask(service, text="Say it again.", format="flac")
    assert other.body != first.body and other.headers["X-Shoal-Cache"] == "hit"
    assert ask(service, text="Say it again.", format=audio_format, use_memory_cache="off").body != b""
    assert [r.outcome for r in service.take_records()] == ["ok"] * 4
    assert model.scheduler.idle


def test_phrases_are_read_from_a_file(tmp_path):
    file = tmp_path / "phrases.txt"
    file.write_text("\ufeffHello.\n\n  # a comment\n 안녕하세요. \n", encoding="utf-8")
    assert read_phrases(file) == ["Hello.", "안녕하세요."]
    settings = load_settings({"warm_phrases": "phrases.txt"})
    assert warm_phrases(settings, tmp_path) == ["Hello.", "안녕하세요."]
    assert warm_phrases(load_settings({"warm_phrases": ["One."]}), tmp_path) == ["One."]
    assert warm_phrases(load_settings(None), tmp_path) == []
    with pytest.raises(SettingsError, match="nowhere"):
        read_phrases(tmp_path / "nowhere.txt")


def test_the_configuration_opens_its_tiers(tmp_path):
    section = {"cache_bytes": "1.5GB", "cache_entries": 5, "cache_disk": str(tmp_path / "c"), "cache_disk_bytes": "9MB"}
    cache = open_cache(load_settings(section | {"cache_redis": "redis://127.0.0.1:1/0"}))
    disk, redis = cache.tiers
    assert isinstance(disk, DiskTier) and disk.max_bytes == 9 * 2**20 and isinstance(redis, RedisTier)
    assert (cache.cache_max_bytes, cache.cache_max_entries) == (3 * 2**29, 5)
    assert open_cache(load_settings(None)).tiers == ()
    with pytest.raises(SettingsError, match="absolute"):
        open_cache(load_settings({"cache_disk": "cache"}))
    with pytest.raises(SettingsError, match=r"handler\.cache_bytes: .*'plenty' is no size"):
        load_settings({"cache_bytes": "plenty"})


class Context:
    """What the handler reads of TorchServe's context while it loads."""

    metrics, model_name = None, "fish_speech"

    def __init__(self, directory, section):
        self.model_yaml_config = {"handler": section}
        self.system_properties = {"model_dir": str(directory), "gpu_id": None}


def load_handler(tmp_path, checkpoint, **section):
    spec = importlib.util.spec_from_file_location("handler_under_test", HANDLER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.handle(None, Context(tmp_path, {"checkpoint": str(checkpoint), "device": "cpu"} | section))
    return module._handler.service


def test_the_handler_warms_up_before_it_answers_and_again_from_disk(tmp_path, checkpoint, caplog):
    caplog.set_level("INFO")
    section = {"warm_phrases": ["Hello.", "🐟", "Goodbye."], "cache_disk": str(tmp_path / "cache"), "threads": 1}
    service = load_handler(tmp_path, checkpoint, **section)
    assert ask(service, text="Goodbye.").headers["X-Shoal-Cache"] == "hit"
    assert "2 phrases decoded, 0 known" in caplog.text and "'🐟'" in caplog.text
    load_handler(tmp_path, checkpoint, **section)
    assert "0 phrases decoded, 2 known" in caplog.text


def test_the_handler_keeps_to_a_memory_limit(tmp_path, checkpoint):
    service = load_handler(tmp_path, checkpoint, memory_limit="64GB", batch_limit=3)
    assert service.model.scheduler.batch_limit == 3 and service.model.scheduler.sound.max_frames == 1024
    with pytest.raises(ShoalError, match="give at least"):
        load_handler(tmp_path, checkpoint, memory_limit="64MB")


def test_shoal_warm_fills_the_tiers_that_a_server_reads(tmp_path, checkpoint):
    from shoal.cli import app

    phrases = tmp_path / "phrases.txt"
    phrases.write_text("Hello.\nYour order is on its way.\n", encoding="utf-8")
    command = ["warm", str(phrases), "--disk", str(tmp_path / "cache"), "--checkpoint", str(checkpoint)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "2 phrases decoded into disk, 0 known already, 0 failed" in result.output
    assert "0 phrases decoded into disk, 2 known already" in CliRunner().invoke(app, command).output
    service = load_handler(tmp_path, checkpoint, cache_disk=str(tmp_path / "cache"))
    assert ask(service, text="Your order is on its way.").headers["X-Shoal-Cache"] == "hit"
    phrases.write_text("🐟\n", encoding="utf-8")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "1 failed" in result.output
    result = CliRunner().invoke(app, ["warm", str(phrases), "--checkpoint", str(checkpoint)])
    assert result.exit_code == 1 and "no cache to warm" in result.output
