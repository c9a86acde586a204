"""What the machine is, and how much memory a batch takes."""

from __future__ import annotations

import pytest
from shoal.checkpoint import open_checkpoint
from shoal.hardware import estimate_memory, inspect_machine, largest_batch, recommend_batch_size
from shoal.measure import measure_initial_performance, measure_together
from shoal.model.linear import weight_bytes
from shoal.random_checkpoint import write_random_checkpoint
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech
from shoal.ui.svg import bar_chart
from shoal.ui.tables import html_table


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"))


@pytest.fixture(scope="module")
def speech(directory):
    return FishSpeech.load(directory, device="cpu", max_batch_size=8)


def test_the_machine_is_described_without_a_gpu_too():
    machine = inspect_machine()
    assert machine.cores >= 1 and 0 < machine.memory_free <= machine.memory_total
    assert machine.notes and ("GPU" in dict(machine.rows()))
    assert "<table" in machine._repr_html_()


@pytest.mark.parametrize(
    ("gigabytes", "batch"), [(4, (1, 1)), (8, (2, 4)), (12, (4, 6)), (16, (6, 8)), (24, (8, 12)), (80, (8, 12))]
)
def test_the_guides_table(gigabytes, batch):
    assert recommend_batch_size(gigabytes) == batch


def test_the_estimate_is_close_to_what_the_engine_takes(directory, speech):
    config, codec = speech.model.config, open_checkpoint(directory).codec
    params = SamplingParams(seed=1, max_new_tokens=100)
    speech.generate_batch([f"Text number {i} of eight." for i in range(8)], params=params, use_cache=False)
    estimate = estimate_memory(config, 8, 128, itemsize=4, codec=codec)
    assert abs(estimate.weights / weight_bytes(speech.model) - 1) < 0.1
    fast = config.n_fast_layer * 8 * config.num_codebooks * 2 * config.fast_n_local_heads * config.fast_head_dim * 4
    assert abs((estimate.kv_cache + fast) / speech._engine.kv_bytes - 1) < 0.1


def test_more_memory_holds_larger_batches(speech):
    batches = [largest_batch(speech.model.config, size) for size in (10**6, 10**8, 10**9, 10**10)]
    assert batches[0] == 0 and batches == sorted(batches) and batches[-1] > 8


def test_both_ways_of_speaking_are_measured(speech):
    texts, params = ["One text.", "Another text."], SamplingParams(seed=1, max_new_tokens=20)
    alone = measure_initial_performance(
        texts, speech, speak=lambda text: speech.synthesize(text, params=params, use_cache=False)
    )
    together = measure_together(texts, speech, params)
    for report in (alone, together):
        assert [m.text for m in report.measurements] == texts
        assert report.audio_seconds > 0 and report.real_time_factor > 0 and report.texts_per_second > 0
    assert alone.audio_seconds == pytest.approx(together.audio_seconds)
    assert alone.mean_latency <= alone.total_seconds


def test_tables_and_plots_escape_what_they_show():
    assert "<script>" not in html_table(("a",), [("<script>",)]) + bar_chart("<script>", ["<script>"], [1.0])
    assert bar_chart("Longest wins", ["a", "b"], [1.0, 2.0], "s").count("<rect") == 2
