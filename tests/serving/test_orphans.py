"""A notebook's kernel that is killed leaves a server behind: the next one finds and stops it, and stops no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.background import own_folder, stop_orphans
from shoal.serving.processes import group_members

pytestmark = pytest.mark.server

KERNEL = """
import sys, time
from shoal.ui.server import ServerState
state = ServerState(sys.argv[1], ["Hello."])
state.start_server()
print(state.server.pid, state.server.run_dir, flush=True)
time.sleep(600)
"""


def test_the_server_of_a_killed_kernel_is_stopped_by_the_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = os.environ | {"OMP_NUM_THREADS": "1", "SHOAL_STATE_DIR": str(tmp_path / "state")}
    checkpoint = write_random_checkpoint(tmp_path / "smoke")
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(checkpoint)], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    )
    try:
        group, run_dir = kernel.stdout.readline().split()
    finally:
        kernel.send_signal(signal.SIGKILL)
        kernel.wait()
    folder = tmp_path / "state" / "notebooks"
    mine = own_folder(folder)
    (mine / "other.json").write_text("{}")
    assert group_members(int(group)) and Path(run_dir).exists()
    assert stop_orphans(folder) == 1
    deadline = time.monotonic() + 20
    while group_members(int(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_members(int(group)) and not Path(run_dir).exists()
    assert [place.name for place in folder.iterdir()] == [mine.name], "what the living have is left alone"
    assert (mine / "other.json").exists() and stop_orphans(folder) == 0


def test_a_number_that_another_process_has_now_is_not_its_owner(tmp_path):
    """Process ids come again; the time of birth does not."""
    me = psutil.Process()
    dead = tmp_path / f"{me.pid}-{int(me.create_time()) - 1000}"
    dead.mkdir()
    (dead / "server.json").write_text("not a note")
    foreign = tmp_path / "notes-of-mine"
    foreign.mkdir()
    assert stop_orphans(tmp_path) == 0
    assert not dead.exists() and foreign.exists()
