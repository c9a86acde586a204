"""Limits of a running service change through a file: atomically, checked, and back to what is configured."""

from __future__ import annotations

import pytest
from shoal.errors import RequestError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.control import ControlFile, LiveLimits, read_limits, set_limits
from shoal.serving.limits import HandlerSettings, Limits
from shoal.serving.service import SpeechService
from shoal.speech import FishSpeech


def test_values_are_merged_and_put_back(tmp_path):
    file = tmp_path / "control.json"
    assert read_limits(file) == LiveLimits()
    assert set_limits(file, batch_limit=4, cache_bytes="2MB").cache_bytes == 2 * 1024**2
    assert set_limits(file, max_waiting=0) == LiveLimits(batch_limit=4, cache_bytes=2 * 1024**2, max_waiting=0)
    assert set_limits(file, batch_limit=None).batch_limit is None
    assert read_limits(file).max_waiting == 0
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b'{"batch_limit": 0}', "batch_limit"),
        (b'{"batch_limit": "4"}', "batch_limit"),
        (b'{"cache_bytes": "lots"}', "cache_bytes"),
        (b'{"checkpoint": "/etc"}', "checkpoint"),
        (b" " * 70_000, "larger"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_mistakes_are_named_and_change_nothing(tmp_path, content, said):
    file = tmp_path / "control.json"
    file.write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read_limits(file)
    watcher = ControlFile(file)
    assert watcher.poll() is None and said in watcher.error
    file.unlink()
    set_limits(file, batch_limit=2)
    assert watcher.poll(now=True) == LiveLimits(batch_limit=2) and watcher.error is None


def test_a_value_that_is_not_allowed_is_not_written(tmp_path):
    file = tmp_path / "control.json"
    set_limits(file, batch_limit=3)
    with pytest.raises(RequestError, match="slice_ms"):
        set_limits(file, slice_ms=-1.0)
    assert read_limits(file) == LiveLimits(batch_limit=3)


def test_the_file_is_looked_at_now_and_then_and_told_once(tmp_path):
    now = [0.0]
    watcher = ControlFile(tmp_path / "c.json", clock=lambda: now[0])
    assert watcher.poll() is None
    set_limits(tmp_path / "c.json", batch_limit=2)
    assert watcher.poll() is None
    now[0] = 0.3
    assert watcher.poll() == LiveLimits(batch_limit=2) and watcher.poll(now=True) is None
    (tmp_path / "c.json").unlink()
    assert watcher.poll(now=True) == LiveLimits()
    assert ControlFile(None).poll(now=True) is None


def test_a_service_takes_them_and_goes_back(tmp_path):
    model = FishSpeech.load(write_random_checkpoint(tmp_path), device="cpu", max_batch_size=8)
    service = SpeechService(model, HandlerSettings(batch_limit=6, limits=Limits(max_waiting=5)))
    before = service.describe()
    assert (before["batch_limit"], before["limits"]["max_waiting"]) == (6, 5)
    service.apply(LiveLimits(batch_limit=100, max_waiting=1, cache_bytes=1000, slice_ms=10.0))
    now = service.describe()
    assert (now["batch_limit"], now["limits"]["max_waiting"], now["slice_ms"]) == (8, 1, 10.0)
    assert now["cache"]["max_bytes"] == 1000 and now["cache"]["max_entries"] == before["cache"]["max_entries"]
    service.apply(LiveLimits())
    assert service.describe() == before
