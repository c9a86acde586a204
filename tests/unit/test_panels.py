"""Each panel on a small model of random weights: its buttons are pressed, its state and what it shows are looked at."""

from __future__ import annotations

import asyncio
import io
import re

import ipywidgets as widgets
import pytest
import soundfile
from shoal.errors import RequestError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.ui.baseline import ALONE, TOGETHER, BaselinePanel
from shoal.ui.batch import BatchPanel
from shoal.ui.cache import CachePanel
from shoal.ui.device import DevicePanel
from shoal.ui.realtime import RealtimePanel
from shoal.ui.tuning import TuningPanel

TEXTS = ["One and one.", "Two.", "Three, three.", "Four."]
SHORT = SamplingParams(seed=3, max_new_tokens=10)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


@pytest.fixture
def model(directory):
    return FishSpeech.load(directory, device="cpu", max_batch_size=8, weights_cache=True)


def press(panel, name: str) -> str:
    """Press a run button, wait, return the status."""
    panel.job.run_buttons[name].click()
    asyncio.run(asyncio.wait_for(panel.state.wait(), timeout=60))
    return panel.state.status


def heard(player) -> list[float]:
    """Seconds of each take."""
    takes = [soundfile.read(io.BytesIO(sound)) for sound in player.sounds]
    return [len(audio) / rate for audio, rate in takes]


def controls(widget) -> list[widgets.Widget]:
    inside = getattr(widget, "children", ())
    return [widget, *(below for child in inside for below in controls(child))]


def test_the_device_panel_looks_again_and_redraws_as_the_batch_moves():
    panel = DevicePanel()
    assert "processor" in panel.found.value and "8 to 12" in panel.guide.value
    assert "A batch of 8 takes" in panel.picture.value
    (slider,) = [w for w in controls(panel.view) if isinstance(w, widgets.IntSlider) and w.max == 128]
    slider.value = 64
    assert panel.state.batch == 64 and "A batch of 64 takes" in panel.picture.value
    before = panel.state.machine
    assert press(panel, "Look again") == "done" and panel.state.machine is not before


def test_the_baseline_panel_compares_and_lets_hear(model):
    panel = BaselinePanel(model, TEXTS, None, SHORT)  # with upstream: notebook 02
    panel.state.count = 2
    assert press(panel, "Measure") == "done"
    assert [r.name for r in panel.state.reports] == [ALONE, TOGETHER]
    assert all(len(r.measurements) == 2 and r.total_seconds > 0 for r in panel.state.reports)
    assert panel.table.value.count("<tr>") == 3 and "<svg" in panel.picture.value
    assert panel.player.title == TEXTS[0] and len(set(heard(panel.player))) == 1
    panel.text.value = 1
    assert panel.player.title == TEXTS[1] and panel.state.chosen == 1


def test_the_batch_panel_measures_finds_and_lets_hear(model):
    panel = BatchPanel(model, TEXTS, SHORT, candidates=(1, 2, 64), repeats=1)
    panel.state.batch_limit = 3
    assert press(panel, "Measure this size") == "done"
    assert set(panel.state.speeds) == {3} and panel.state.speeds[3] > 0 and "<polyline" in panel.picture.value
    assert panel.player.labels == ["alone", "in a batch of 3"]
    assert panel.player.sounds[0] == panel.player.sounds[1], "a batch changes nothing that can be heard"
    assert press(panel, "Find the best size") == "done"
    assert panel.state.batch_limit == panel.state.search.best and [
        m.batch_size for m in panel.state.search.measurements
    ] == [1, 2]
    assert panel.picture.value.count("<polyline") == 2 and "best" in panel.table.value
    panel.state.texts = [""]
    assert press(panel, "Measure this size") == "failed" and panel.job.error.value
    panel.state.texts = list(TEXTS)
    assert press(panel, "Measure this size") == "done" and not panel.job.error.value


def test_cancel_stops_a_search(model):
    panel = BatchPanel(model, TEXTS, SamplingParams(seed=1, max_new_tokens=300), candidates=(1, 2, 4), repeats=50)

    def cancel_soon(change):
        if "batch 2" in change.new:
            panel.job.cancel_button.click()

    panel.state.observe(cancel_soon, "status")
    assert press(panel, "Find the best size") == "cancelled" and model.scheduler.idle


def test_the_realtime_panel_answers_all_and_keeps_a_row_per_run(model):
    panel = RealtimePanel(model, TEXTS, SHORT)
    panel.state.set_trait("count", 8)
    panel.state.set_trait("rate", 40.0)
    assert press(panel, "Send requests") == "done"
    assert len(panel.state.answers) == 8 and max(a.batch_size for a in panel.state.answers) > 1
    assert panel.picture.value.count("<rect") == 8 + 4 and len(panel.state.runs) == 1
    panel.state.max_batch_capacity = 1
    assert press(panel, "Send requests") == "done"
    assert [run[0] for run in panel.state.runs] == [8, 1] and {a.batch_size for a in panel.state.answers} == {1}
    assert 1 <= len(panel.player.sounds) <= 3 and all(seconds > 0.1 for seconds in heard(panel.player))


def test_cancel_stops_the_requests(model):
    panel = RealtimePanel(model, TEXTS, SamplingParams(seed=1, max_new_tokens=200))
    panel.state.set_trait("count", 200)
    panel.state.observe(lambda _: panel.job.cancel_button.click(), "answers")
    assert press(panel, "Send requests") == "cancelled"
    assert 0 < len(panel.state.answers) < 200 and model.scheduler.idle and not panel.state.runs


def test_the_cache_panel_shows_what_repeats_save(model):
    model.set_internal_cache_capacity("1MB")  # by bytes alone
    panel = CachePanel(model, TEXTS, SHORT)
    assert model.cache.cache_max_entries == panel.state.max_entries == 100, "what is shown is so"
    panel.state.set_trait("count", 12)
    assert press(panel, "Send requests") == "done"
    asked, stats = panel.state.asked, panel.state.stats
    different = {a.text for a in asked}
    assert [a.hit for a in asked].count(False) == len(different) == stats.misses and stats.hits == 12 - stats.misses
    assert f"{stats.hits / 12:.0%} of 12 requests" in panel.picture.value
    assert panel.player.sounds[0] == panel.player.sounds[1], "remembered as it was made"
    assert press(panel, "Clear the cache") == "done" and model.cache.stats().entries == 0 and not panel.player.sounds
    panel.state.max_entries = 1
    assert press(panel, "Send requests") == "done"
    assert panel.state.stats.entries == 1 and panel.state.stats.evictions > 0
    panel.keep_sound.value = True
    assert model.audio_cache is not None and press(panel, "Send requests") == "done"


def test_every_control_has_a_name_for_keyboard_and_screen_reader(model):
    for panel in (
        DevicePanel(), BaselinePanel(model, TEXTS), BatchPanel(model, TEXTS), CachePanel(model, TEXTS),
        RealtimePanel(model, TEXTS),
    ):  # fmt: skip
        found = controls(panel.view)
        inputs = [w for w in found if isinstance(w, (widgets.Button, widgets.Checkbox, widgets.Dropdown))]
        inputs += [w for w in found if isinstance(w, (widgets.BoundedIntText, widgets.BoundedFloatText))]
        assert inputs and all(w.description for w in inputs)
        assert re.search("[가-힣]", panel.view.children[0].value), "a heading in Korean too"
        assert "text/plain" in panel._repr_mimebundle_()


def test_a_panel_refuses_what_its_state_cannot_be(model):
    panel = BatchPanel(model, TEXTS)
    with pytest.raises(Exception, match="batch_limit"):
        panel.state.batch_limit = 0
    with pytest.raises(RequestError):
        model.synthesize("")


def test_the_tuning_panel_tries_settings_and_puts_the_best_to_use(model):
    panel = TuningPanel(model, TEXTS, SHORT)
    state = panel.state
    assert press(panel, "Use what was found") == "failed" and "press Search" in panel.job.error.value
    state.batch_limits, state.waits_s = [1, 4], (0.0,)
    state.rate, state.requests, state.cache_mb, state.bounded = 50.0, 4, 8, False
    before = model.cache.cache_max_bytes
    assert press(panel, "Search") == "done"
    assert {s.cache_bytes for s, _ in state.trials} == {0, 8 << 20} and len(state.trials) >= 3
    assert model.cache.cache_max_bytes == before, "trials leave the cache as it was"
    assert panel.table.value.count("<tr>") == len(state.trials) + 1 and "8 MB" in panel.picture.value
    assert press(panel, "Use what was found") == "done"
    best = state.found.best
    assert model.scheduler.batch_limit == best.batch_limit and state.wait_s == best.wait_s
    assert model.cache.cache_max_bytes == best.cache_bytes


def test_a_preset_sets_all_that_it_names(model):
    panel = TuningPanel(model, TEXTS, SHORT)
    panel.preset.value = "low_latency"
    assert model.scheduler.batch_limit == 2 and model.cache.cache_max_bytes == 256 * 2**20
    assert panel.state.wait_s == 0.01 and panel.state.stream
    assert all(word in panel.chosen.value for word in ("10", "256", "streamed", "soon", "바로"))
    panel.preset.value = "high_throughput"
    assert model.scheduler.batch_limit == 8 and not panel.state.stream and "whole" in panel.chosen.value
