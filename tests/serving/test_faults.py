"""What clients see when things go wrong around a real server under load: an answer in time, and then all is well."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
import redis
import requests
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.probe import worker_error
from shoal.serving.server import TorchServe

from tests.redis_server import NO_REDIS, RedisServer, redis_server_binary

pytestmark = [pytest.mark.server, pytest.mark.slow]

LIMIT_S = 60.0  # that a request may take before the server says 504; no client waits longer than that and some more
HEALTHY_S = 30.0  # after a fault
FAKETIME = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketimeMT.so.1")
fresh = itertools.count()  # no two requests say the same


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A directory for the cache: a small disk of its own where one may be mounted, else one like any other."""
    directory = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(directory)]
    mounted = bool(shutil.which("mount")) and subprocess.run(mount, capture_output=True).returncode == 0
    yield directory
    if mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    if redis_server_binary() is not None:
        running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """The file that says how far off the server's wall clock is; None where the clock cannot be moved."""
    if not FAKETIME.is_file():
        return None
    file = tmp_path_factory.mktemp("clock") / "offset"
    file.write_text("+0\n")
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory, checkpoint, disk, redis_server, clock):
    handler = {"limits": {"max_seconds": LIMIT_S, "max_waiting": 32}, "max_batch_size": 8}
    handler |= {"cache_disk": str(disk / "cache"), "cache_redis": redis_server.url}
    archive = build_archive(tmp_path_factory.mktemp("store"), checkpoint=checkpoint, overrides={"handler": handler})
    env = {"OMP_NUM_THREADS": "1"}
    if clock:  # the wall clock alone is moved: what the kernel waits by goes on as it was
        env |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_CACHE_DURATION": "1"}
        # without the last, every timed wait of Java's returns at once, and its threads spin
        env |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_RESET": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
    with TorchServe(archive, config=project_root() / "config.properties", env=env) as running:
        running.wait_ready(180)
        ask(running)
        yield running


def ask(server, text="Hello there.", **fields):
    """Status and seconds of one request; 0 where the connection broke."""
    body = {"text": text, "max_new_tokens": 20, "use_memory_cache": "off", **fields}
    begin = time.monotonic()
    try:
        status = requests.post(server.predict_url, json=body, timeout=LIMIT_S + 30).status_code
    except requests.ConnectionError:
        status = 0
    return status, time.monotonic() - begin


def info(server):
    return requests.get(server.predict_url + "/1.0/v1/info", timeout=30).json()


def worker(server):
    return next(
        p
        for p in psutil.Process(server.pid).children(recursive=True)
        if "model_service_worker" in " ".join(p.cmdline())
    )


@contextlib.contextmanager
def load(server, clients=16, **fields):
    """So many clients that ask again and again; yields the list of what they were answered."""
    stop, answers = threading.Event(), []

    def client():
        while not stop.is_set():
            answers.append(ask(server, f"Number {next(fresh)}.", **fields))
            if answers[-1][0] != 200:
                stop.wait(0.2)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S + 40)
        assert not any(thread.is_alive() for thread in threads), "a client hangs"


def healthy_again(server):
    """Seconds until the server answers as before, and nothing is left over."""
    begin = time.monotonic()
    while True:
        status, _ = ask(server)
        if status == 200 and info(server)["live"] == 0:
            return time.monotonic() - begin
        assert time.monotonic() - begin < HEALTHY_S, f"still {status}"
        time.sleep(0.5)


def wait_for(true, what, seconds=HEALTHY_S):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.05)


def more(answers, count=32):
    """Wait for so many more answers."""
    before = len(answers)
    wait_for(lambda: len(answers) >= before + count, f"{count} answers", LIMIT_S)


def said(server, begin):
    """What the worker wrote to its log from a position on."""
    return (server.log_dir / "model_log.log").read_text(errors="replace")[begin:]


def all_answered(answers):
    assert {status for status, _ in answers} == {200}, Counter(status for status, _ in answers)
    assert max(seconds for _, seconds in answers) < LIMIT_S


def test_without_redis_all_are_answered_and_it_is_used_again_once_it_is_back(server, redis_server):
    if redis_server_binary() is None:
        pytest.skip(NO_REDIS)
    begin = len(said(server, 0))

    def kept():
        with redis.Redis.from_url(redis_server.url) as client:
            return client.dbsize()

    with load(server, use_memory_cache="on") as answers:
        wait_for(kept, "an entry in Redis")
        redis_server.stop()
        more(answers)
        wait_for(lambda: "cache tier redis" in said(server, begin), "a word about it in the log")
        redis_server.start()
        wait_for(kept, "a new entry in Redis")
    all_answered(answers)
    assert "is left out for now" in said(server, begin) and "works again" in said(server, begin)
    assert info(server)["cache"]["tier_errors"]["redis"] > 0
    assert healthy_again(server) < HEALTHY_S


def test_a_full_disk_costs_nobody_an_answer(server, disk):
    begin, cache, filler = len(said(server, 0)), disk / "cache", disk / "filler"
    process = worker(server)
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)

    def ask_database(query):
        with contextlib.closing(sqlite3.connect(cache / "cache.db", timeout=10)) as database:
            return database.execute(query).fetchone()[0]

    def kept():
        return ask_database("SELECT COUNT(*) FROM Cache")

    def fill():
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 1024)

    with load(server, use_memory_cache="on") as answers:
        more(answers)
        assert kept() > 0
        if os.path.ismount(disk):
            ask_database("PRAGMA wal_checkpoint(TRUNCATE)")  # gives back the room that its log has taken already
            fill()
        else:  # the worker may make no file larger, as if there were no room
            process.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
        wait_for(
            lambda: "cache tier disk (writing) is left out for now" in said(server, begin), "a word about it in the log"
        )
        more(answers)
        assert info(server)["cache"]["tier_errors"]["disk"] > 0
        filler.unlink(missing_ok=True)
        process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
        before = kept()
        wait_for(lambda: kept() > before + 3, "new entries on the disk")
    all_answered(answers)
    assert worker(server).pid == process.pid and healthy_again(server) < HEALTHY_S


def test_a_worker_that_is_killed_comes_back_once_its_checkpoint_does(server, checkpoint):
    begin, away = len(said(server, 0)), checkpoint.with_name("away")
    with load(server) as answers:
        more(answers, 16)
        before = worker(server)
        checkpoint.rename(away)
        try:
            before.kill()
            wait_for(lambda: server.worker_states() != ["READY"], "that it is no longer ready")
            wait_for(lambda: str(checkpoint) in said(server, begin), "a word about it in the log")
            told = worker_error(server.log_dir)
            assert server.worker_states() != ["READY"]
        finally:
            away.rename(checkpoint)
        wait_for(lambda: server.worker_states() == ["READY"], "its return")
    assert "CheckpointError" in told and str(checkpoint) in told
    assert healthy_again(server) < HEALTHY_S and worker(server).pid != before.pid
    counts = Counter(status for status, _ in answers)
    assert counts[200] >= 16 and set(counts) <= {0, 200, 500, 503, 507}, counts
    assert max(seconds for _, seconds in answers) < LIMIT_S + 10


def test_a_wall_clock_that_jumps_ends_no_request(server, clock):
    if clock is None:
        pytest.skip("no libfaketime here: apt-get install libfaketime")

    def stamps():  # of the server's own lines; the date alone
        lines = (server.log_dir / "access_log.log").read_text(errors="replace").splitlines()
        return {match[0] for line in lines if (match := re.match(r"\d{4}-\d\d-\d\d", line))}

    with load(server) as answers:
        more(answers, 16)
        for days in (3, -3):
            clock.write_text(f"{days * 86400:+d}\n")
            then = (datetime.now() + timedelta(days=days)).strftime("%Y-%m-%d")
            wait_for(lambda day=then: day in stamps(), f"a line of {then} in the log")
            more(answers)
        clock.write_text("+0\n")
        more(answers, 16)
    all_answered(answers)
    assert healthy_again(server) < HEALTHY_S


def test_two_hundred_clients_at_once_are_answered_or_turned_away(server):
    memory = worker(server).memory_info().rss
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda i: ask(server, f"Client {i}."), range(200)))
    counts = Counter(status for status, _ in answers)
    assert counts[200] >= 8 and set(counts) <= {200, 503}, counts
    assert max(seconds for _, seconds in answers) < LIMIT_S + 10
    assert healthy_again(server) < HEALTHY_S
    assert worker(server).memory_info().rss < memory + 300e6


def test_garbage_on_the_socket_disturbs_nobody(server):
    garbage = [
        b"\x00" * 5000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /predictions/fish_speech HTTP/1.1\r\nContent-Length: 99999\r\n\r\nx",
    ]
    garbage += [b"\xff\xfe" * 2000, b"POST " + b"/a" * 9000 + b" HTTP/1.1\r\n\r\n", b"{" * 100]
    with load(server, 4) as answers:
        for raw in garbage * 2:
            with socket.create_connection(("127.0.0.1", server.ports.inference), timeout=5) as connection:
                connection.settimeout(0.5)
                with contextlib.suppress(OSError):
                    connection.sendall(raw)
                    connection.recv(1000)
    assert {status for status, _ in answers} == {200}
    assert healthy_again(server) < HEALTHY_S


def test_a_client_that_reads_slowly_holds_nobody_up(server):
    slow = requests.post(
        server.predict_url, json={"text": "A slow listener. " * 20, "streaming": True}, stream=True, timeout=60
    )
    with slow, load(server, 4) as answers:
        chunks = slow.iter_content(512)
        for _ in range(6):
            next(chunks, None)
            time.sleep(0.5)
    assert answers and {status for status, _ in answers} == {200}
    assert healthy_again(server) < HEALTHY_S


def test_a_listener_that_hangs_up_frees_its_row_at_once(server):
    def rows():
        return info(server)["live"]

    text = "A long story, and nobody listens to its end. " * 10
    reply = requests.post(
        server.predict_url, json={"text": text, "streaming": True, "max_new_tokens": 2000}, stream=True, timeout=60
    )
    next(reply.iter_content(256))
    live = rows()
    reply.close()
    deadline = time.monotonic() + 10
    while rows() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rows() == 0, f"{live} rows were live, and stay"


def test_the_wall_clock_decides_nothing():
    """A clock that jumps can end no request early: deadlines are read from the monotonic clock alone."""
    handler = project_root() / "handler"
    for file in (*handler.rglob("*.py"),):
        assert "time.time()" not in file.read_text(encoding="utf-8"), file.name
