"""The soak of benchmarks/soak.py for a quarter of a minute: right answers, and nothing left over."""

from __future__ import annotations

import time

import pytest
from shoal.archive import build_archive
from shoal.project import project_root
from shoal.random_checkpoint import write_random_checkpoint
from shoal.serving.server import TorchServe

from benchmarks.soak import Soak, judge, look_at
from benchmarks.texts import CALL_CENTRE

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_quarter_of_a_minute_of_everything_leaves_nothing_behind(tmp_path):
    checkpoint = write_random_checkpoint(tmp_path / "smoke")
    archive = build_archive(tmp_path, checkpoint=checkpoint)
    with TorchServe(archive, config=project_root() / "config.properties") as server:
        server.wait_ready(180)
        soak = Soak(server, CALL_CENTRE, clients=6, seed=0)
        seen = soak.run(15.0, watch_every_s=1.0)
        time.sleep(3.0)
        after = look_at(server)
    # so short a time is all warm-up: what memory does is for the twenty minutes of the benchmark
    assert judge(seen, after, soak.surprises, growth=0.5) == []
    assert sum(soak.done.values()) > 30 and set(soak.done) == {
        "whole",
        "repeated",
        "streamed",
        "voice",
        "wrong",
        "hang-up",
    }
