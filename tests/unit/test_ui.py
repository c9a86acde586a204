"""The pieces that panels are built of: jobs that report and can be cancelled, plots, sliders, the A/B player."""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time

import numpy as np
import soundfile
import traitlets
from shoal.errors import RequestError
from shoal.ui.ab import ABPlayer, wav_bytes
from shoal.ui.controls import number_slider
from shoal.ui.jobs import UPDATES_PER_SECOND, Job, JobButton, JobView
from shoal.ui.svg import bar_chart, dot_chart, line_chart, span_chart


def finished(job: Job) -> Job:
    asyncio.run(asyncio.wait_for(job.wait(), timeout=20))
    return job


def test_a_button_runs_its_job_and_is_ready_for_the_next():
    job, ran = Job(), []
    view = JobView(job, {"Go": lambda: ran.append(threading.current_thread().name)})
    assert view.cancel_button.disabled and not view.run_button.disabled and view.status.value == "ready"
    for _ in range(2):
        view.run_button.click()
        finished(job)
    assert ran == ["shoal-job"] * 2
    assert (view.status.value, view.bar.value, view.error.value) == ("done", 1.0, "")
    assert view.cancel_button.disabled and not view.run_button.disabled


def test_cancel_ends_the_work_and_only_one_job_runs_at_a_time():
    job, started = Job(), threading.Event()

    def work():
        started.set()
        while True:
            job.check()
            time.sleep(0.005)

    view = JobView(job, {"Go": work, "Other": work})
    view.run_button.click()
    started.wait(5)
    assert not job.start(work) and all(button.disabled for button in view.run_buttons.values())
    view.cancel_button.click()
    assert finished(job).status == "cancelled" and not view.run_buttons["Other"].disabled


def test_errors_are_shown_and_the_next_run_clears_them():
    job = Job()

    def wrong():
        raise RequestError("this text is empty: write something")

    view = JobView(job, {"Wrong": wrong, "Broken": lambda: 1 / 0, "Right": lambda: None})
    view.run_buttons["Wrong"].click()
    finished(job)
    assert (view.status.value, view.error.value) == ("failed", "this text is empty: write something")
    view.run_buttons["Broken"].click()
    finished(job)
    assert view.error.value.startswith("ZeroDivisionError")
    view.run_buttons["Right"].click()
    assert finished(job).error == "" and view.error.value == ""


def test_a_flood_of_reports_becomes_few_updates_on_the_notebooks_own_thread():
    seen = []

    async def notebook():
        job = Job()
        job.observe(lambda change: seen.append((change.new, threading.current_thread())), "progress")

        def work():
            begin = time.monotonic()
            while time.monotonic() - begin < 0.5:
                job.post(progress=(time.monotonic() - begin) / 0.6)
                time.sleep(0.0005)

        job.start(work)
        await job.wait()

    asyncio.run(notebook())
    assert 2 <= len(seen) <= 0.5 * UPDATES_PER_SECOND + 4 and seen[-1][0] == 1.0
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_a_job_button_shows_the_html_of_its_work():
    button = JobButton("Count", lambda report, cancelled: report("one") or f"<b>{cancelled()}</b>")
    button.run_button.click()
    asyncio.run(button.wait())
    assert (button.result.value, button.status.value) == ("<b>False</b>", "done")


def test_slider_and_box_follow_the_state_and_each_other():
    class State(traitlets.HasTraits):
        size = traitlets.Int(4)
        wait = traitlets.Float(0.5)

    state = State()
    box, slider = number_slider(state, "size", "batch size", 1, 8).children
    slider.value = 6
    assert state.size == 6 and box.value == 6 and box.description == "batch size"
    state.size = 2
    assert (box.value, slider.value) == (2, 2)
    box, slider = number_slider(state, "wait", "longest wait", 0, 1, 0.1).children
    box.value = 0.3
    assert state.wait == slider.value == 0.3


def test_plots_say_what_they_claim_and_hold_each_point():
    lines = line_chart("B wins", {"A": [(1, 1.0), (8, 2.0)], "B": [(1, 2.0), (8, 4.0)]}, "batch", "speed", log_x=True)
    assert lines.count("<polyline") == 2 and lines.count("<circle") == 4 and 'aria-label="B wins"' in lines
    points = re.findall(r'points="([^"]+)"', lines)
    highest = [min(float(p.split(",")[1]) for p in line.split()) for line in points]
    assert highest[1] < highest[0], "more is further up"
    dots = dot_chart("Hits are quick", {"miss": [(0, 1.0)], "hit": [(1, 0.1), (2, 0.1)]}, "request", "s")
    assert dots.count("<circle") == 2 and dots.count('width="7"') == 3  # with those of the legend
    spans = span_chart("Two at a time", [(0, 1, 0), (0.5, 2, 1)], ["alone", "together"], "s")
    assert spans.count("<rect") == 4 and "together" in spans
    long_unit = bar_chart("", ["a"], [123.0], "seconds per second of sound")
    (x,) = re.findall(r'<text x="([\d.]+)" y="54" fill', long_unit)
    assert float(x) + 7 * len("123 seconds per second of sound") <= 690, "there is room for the figure"
    for empty in (
        line_chart("", {}, "", ""),
        dot_chart("", {}, "", ""),
        span_chart("", [], [], ""),
        bar_chart("", [], []),
    ):
        assert empty.endswith("</svg>") and "nan" not in empty
    for drawn in (line_chart("<b>", {"<b>": [(0, 0)], "<i>": []}, "<b>", "<b>"), bar_chart("<b>", ["<b>"], [1])):
        assert "<b>" not in drawn and "<i>" not in drawn


def test_the_player_leaves_loudness_as_it_is():
    quiet = np.full(1600, 0.125, dtype=np.float32)
    player = ABPlayer([("quiet", quiet, 16000), ("loud", 4 * quiet, 16000)], title="Two takes")
    heard = [soundfile.read(io.BytesIO(sound)) for sound in player.sounds]
    assert [round(float(audio.max()), 3) for audio, _ in heard] == [0.125, 0.5]
    assert heard[0][1] == 16000 and player.labels == ["quiet", "loud"]
    player.active = 1
    player.set_takes([("clipped", 20 * quiet, 8000)])
    assert (player.active, player.title, len(player.sounds)) == (0, "Two takes", 1)
    assert soundfile.read(io.BytesIO(wav_bytes(-20 * quiet, 8000)))[0].min() == -1.0
