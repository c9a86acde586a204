"""TorchServe starts, tells what is wrong when it does not, and leaves no process behind however it ends."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from shoal.archive import build_archive
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.demo import check_wav
from shoal.serving.server import Ports, ServerError, TorchServe

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "smoke"
    write_random_checkpoint(directory, size="smoke", seed=0)
    return directory


@pytest.fixture
def place():
    """A short temporary directory that the server's TMPDIR goes into, so that its processes are known by it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as directory:
        yield Path(directory)
        for process in processes_in(directory):  # only after a failed test
            process.kill()


@pytest.fixture
def environment(place, smoke):
    own = {"TMPDIR": place, "SHOAL_STATE_DIR": place / "state", "SHOAL_MODEL_STORE": place / "store"}
    return {**os.environ, "CHECKPOINT": str(smoke), **{key: str(value) for key, value in own.items()}}


def processes_in(directory):
    """Processes that were given a path in the directory: the frontend and its workers all are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(directory) in " ".join(process.cmdline()):
                found.append(process)
    return found


def start(command, environment, place, until):
    """Start a `shoal` command and read its output up to a word."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "shoal", *command], env=environment, cwd=place, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if until in line:
            return process
    raise AssertionError(f"shoal {command} ended with {process.wait()} before it said {until!r}")


@pytest.mark.parametrize(("number", "until"), [(signal.SIGINT, "ready at"), (signal.SIGTERM, "workers load")])
def test_a_demo_that_is_interrupted_leaves_no_process(environment, place, number, until):
    process = start(["demo", "-o", str(place / "out")], environment, place, until)
    assert processes_in(place / "shoal-")
    if until == "ready at":
        time.sleep(1)  # into a request
    process.send_signal(number)
    assert process.wait(timeout=60) == (130 if number == signal.SIGINT else 128 + number)
    assert not processes_in(place)
    assert not list(place.glob("shoal-*"))


def test_a_second_ctrl_c_does_not_break_the_clean_up(environment, place):
    process = start(["demo", "-o", str(place / "out")], environment, place, "workers load")
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    process.wait(timeout=60)
    assert not processes_in(place)


def test_serve_in_the_background_prints_a_curl_line_that_works_and_stop_ends_it(environment, place):
    def shoal(command):
        return subprocess.run(
            [sys.executable, "-m", "shoal", *command], env=environment, cwd=place, capture_output=True, text=True
        )

    served = shoal(["serve", "--background"])
    assert served.returncode == 0, served.stdout + served.stderr
    curl = next(line.strip() for line in served.stdout.splitlines() if line.strip().startswith("curl "))
    if shutil.which("curl"):
        subprocess.run(curl, shell=True, check=True, cwd=place, timeout=120)
        assert check_wav((place / "hello.wav").read_bytes()) > 0

    again = shoal(["serve", "--background"])
    assert again.returncode == 0
    assert curl in again.stdout  # it says where the running one is, and starts no second

    assert shoal(["stop"]).stdout.strip() == "stopped"
    assert not processes_in(place)
    assert not list(place.glob("shoal-*"))
    assert shoal(["stop"]).stdout.strip() == "no server of ours is running"
    assert "-d" in shlex.split(curl)


def test_stop_also_ends_what_a_killed_launcher_left(environment, place):
    process = subprocess.run(
        [sys.executable, "-m", "shoal", "serve", "--background"], env=environment, cwd=place, capture_output=True
    )
    assert process.returncode == 0
    launcher = min(processes_in(place / "shoal-"), key=lambda p: p.create_time())
    launcher.kill()
    time.sleep(0.5)
    assert processes_in(place)
    subprocess.run([sys.executable, "-m", "shoal", "stop"], env=environment, cwd=place, check=True)
    assert not processes_in(place)


def test_a_checkpoint_that_does_not_load_is_named(place, smoke):
    broken = place / "broken"
    shutil.copytree(smoke, broken)
    (broken / "model.pth").write_text("<!doctype html><html>not found</html>")
    with TorchServe(build_archive(place, checkpoint=broken)) as server:
        begin = time.monotonic()
        with pytest.raises(ServerError, match=re.escape(str(broken / "model.pth"))):
            server.wait_ready(timeout_s=240)
        assert time.monotonic() - begin < 120  # at the first death, not when TorchServe gives up
        run_dir = server.run_dir
    assert not processes_in(run_dir)


def test_a_taken_port_and_a_missing_archive_are_said_before_anything_starts(tmp_path):
    with pytest.raises(ServerError, match="no such archive"):
        TorchServe(tmp_path / "absent.mar").start()
    (tmp_path / "a.mar").write_bytes(b"")
    ports = Ports.free()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.management))
        taken.listen()
        with pytest.raises(ServerError, match=str(ports.management)):
            TorchServe(tmp_path / "a.mar", ports=ports).start()


def test_sigterm_finishes_what_is_there_and_a_dead_server_is_started_again(environment, place):
    process = start(["serve"], environment, place, "stop it with")
    url = None
    try:
        front = next(p for p in processes_in(place) if p.name() == "java")
        ports = sorted(c.laddr.port for c in front.net_connections("inet") if c.status == psutil.CONN_LISTEN)
        url = next(u for u in (f"http://127.0.0.1:{p}/predictions/fish_speech" for p in ports) if _answers(u))
        front.kill()
        lines = iter(process.stdout.readline, "")
        assert any("started again" in line for line in lines)
        assert any("stop it with" in line for line in lines)
        body = {"text": "A long text, sentence after sentence. " * 12, "seed": 1, "max_new_tokens": 60}
        with ThreadPoolExecutor(4) as pool:
            under_way = [pool.submit(requests.post, url, json=body | {"seed": i}, timeout=120) for i in range(4)]
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            assert any("no new requests" in line for line in lines)
            with contextlib.suppress(requests.ConnectionError):  # already gone
                late = requests.post(url, json={"text": "Too late."}, timeout=60)
                assert late.status_code == 503 and "going down" in late.json()["message"]
            assert [reply.result().status_code for reply in under_way] == [200] * 4
        assert any("all done" in line for line in lines)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        if process.poll() is None:
            process.kill()
    assert not processes_in(place)


def _answers(url):
    try:
        return requests.get(url + "/1.0/v1/info", timeout=10).status_code == 200
    except requests.RequestException:
        return False
