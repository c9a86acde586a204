"""A watch tells what it cannot see, and never ends for it."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest
from shoal.errors import RequestError, ShoalError
from shoal.serving.control import read_limits
from shoal.serving.metrics import Recent, RequestRecord
from shoal.serving.watch import Watch, ask, info_url
from shoal.tuning import LimitController


class Pretender(http.server.BaseHTTPRequestHandler):
    """Answers what it is told to, as JSON."""

    answer: object = {}
    status = 200

    def do_GET(self) -> None:
        body = json.dumps(self.answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pretender():
    class Handler(Pretender):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def told(p95: float, waiting: int, live: int, limit: int) -> dict:
    recent = {"requests": 5, "p50_s": p95 / 2, "p95_s": p95, "texts_per_s": 3.0, "hit_rate": 0.0}
    cache = {"bytes": 10, "max_bytes": 100}
    return {
        "engine": "shoal", "live": live, "waiting": waiting, "batch_limit": limit, "recent": recent, "cache": cache
    }  # fmt: skip


def test_addresses():
    whole = "http://127.0.0.1:8080/predictions/fish_speech/1.0/v1/info"
    assert info_url("http://127.0.0.1:8080") == info_url("http://127.0.0.1:8080/predictions/fish_speech/") == whole
    assert info_url(whole) == whole
    for wrong in ("file:///etc/passwd", "127.0.0.1:8080", ""):
        with pytest.raises(RequestError, match="no address"):
            Watch(wrong)


def test_what_is_not_there_or_is_another_is_told(pretender):
    handler, url = pretender
    with pytest.raises(ShoalError, match="no Shoal server"):
        ask(url)
    handler.status = 401
    with pytest.raises(ShoalError, match=r"401.*token"):
        ask(url)
    with pytest.raises(ShoalError, match="no answer"):
        ask("http://127.0.0.1:9", timeout_s=2)


def test_it_goes_on_when_the_server_comes_back_and_keeps_the_last_points_only(pretender):
    handler, url = pretender
    handler.answer, handler.status = told(1.0, 0, 2, 4), 503
    with Watch(url, every_s=0.05, capacity=3) as watch:
        until(lambda: watch.error)
        assert "503" in watch.error and not watch.points
        handler.status = 200
        until(lambda: len(watch.points) == 3 and watch.points[0].at > 0.1)
        assert watch.error is None and watch.info["batch_limit"] == 4
    count = watch.points
    time.sleep(0.12)
    assert watch.points == count and [p.p95_s for p in count] == [1.0] * 3


def test_the_limit_follows_within_bounds_and_stays_when_told_to(pretender, tmp_path):
    handler, url = pretender
    handler.answer = told(9.0, waiting=20, live=2, limit=2)
    watch, file = Watch(url), tmp_path / "control.json"
    with pytest.raises(RequestError, match="control file"):
        watch.follow(LimitController(2))
    watch.follow(LimitController(2, most=8, p95_s=1.0, rest=1), file)
    for _ in range(12):
        watch.look()
        if file.exists():
            handler.answer["batch_limit"] = read_limits(file).batch_limit
    assert read_limits(file).batch_limit == 8
    watch.follow(None)
    handler.answer = told(0.1, waiting=0, live=1, limit=5)
    watch.look()
    assert read_limits(file).batch_limit == 8


def test_only_what_was_answered_lately_is_summed_up():
    recent = Recent(window_s=10.0, capacity=4)
    assert recent.summary(0.0) == {
        "window_s": 10.0, "requests": 0, "p50_s": None, "p95_s": None, "texts_per_s": None, "audio_s_per_s": None,
        "hit_rate": None,
    }  # fmt: skip
    recent.add(1.0, RequestRecord("failed", "failed", 500, 1.0))
    for i in range(6):
        recent.add(2.0 + i, RequestRecord(str(i), "ok", 200, 0.1 * i, audio_seconds=2.0, cache_hit=i == 5))
    found = recent.summary(8.0)
    assert found["requests"] == 4 and found["p50_s"] == 0.3 and found["p95_s"] == 0.5
    assert found["texts_per_s"] == pytest.approx(4 / 8) and found["audio_s_per_s"] == pytest.approx(1.0)
    assert found["hit_rate"] == 0.25
    assert recent.summary(16.5)["requests"] == 1 and recent.summary(60.0)["p95_s"] is None


def until(condition, seconds: float = 20.0) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.01)
