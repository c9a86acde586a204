"""The tracker keeps the last of what threads tell it, sums it up, exports it and advises in two languages."""

from __future__ import annotations

import csv
import io
import json
import re
import threading

import pytest
from shoal.errors import RequestError
from shoal.monitoring import PRESETS, PerformanceTracker, Thresholds, percentile


def tracker(count=40, **options):
    now = [0.0]
    found = PerformanceTracker(clock=lambda: now[0], **options)
    for i in range(count):
        now[0] += 0.5
        found.add_latency_data(0.1 + 0.01 * i, audio_s=0.5, cache_hit=i % 2 == 0, batch_size=4)
    return found


def test_the_summary_is_what_was_told():
    found = tracker().summarize_performance()
    assert found.requests == 40 and found.mean_latency_s == pytest.approx(0.295)
    assert (found.p50_s, found.p95_s, found.p99_s) == pytest.approx((0.29, 0.47, 0.49))
    assert found.texts_per_s == pytest.approx(2.0) and found.hit_rate == 0.5 and found.mean_batch == 4
    assert found.real_time_factor == pytest.approx(0.59)
    assert {"p95 (s)", "hit rate"} <= {name for name, _ in found.rows()}
    assert all("GPU" not in name for name, _ in found.rows()) == (found.gpu_bytes is None)


def test_what_is_reported_counts_before_what_is_reckoned():
    found = tracker()
    found.add_throughput_data(30, 2.0)
    assert found.summarize_performance().texts_per_s == 15.0


def test_older_samples_leave():
    found = tracker(100, capacity=10)
    assert found.summarize_performance().requests == 10 == len(found.samples())
    assert found.summarize_performance().p50_s > 1.0


def test_threads_lose_nothing():
    found = PerformanceTracker(capacity=10_000)

    def tell():
        for _ in range(500):
            found.add_latency_data(0.1)
            found.add_throughput_data(1, 1.0)
            found.summarize_performance()

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.summarize_performance().requests == 4000 and len(found.samples()) == 8000


def test_exports_hold_every_sample():
    found = tracker(5)
    found.add_throughput_data(3, 1.5)
    assert len(json.loads(found.to_json())["samples"]) == 6
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == 6 and rows[0]["latency_s"] == "0.1" and rows[-1]["texts_per_s"] == "2.0"
    frame = found.to_pandas()
    assert len(frame) == 6 and frame["latency_s"].count() == 5
    assert json.loads(PerformanceTracker().to_json())["summary"] is None


def test_advice_names_the_figure_and_the_bound_in_both_languages():
    found = tracker()
    assert found.provide_optimization_suggestions(thresholds=Thresholds(latency_s=9, texts_per_s=1)) == [
        "Nothing stands out: all figures are within their bounds."
    ]
    strict = Thresholds(latency_s=0.1, texts_per_s=50, hit_rate=0.9, real_time_factor=0.1, batch_size=8)
    english = found.provide_optimization_suggestions("en", strict)
    korean = found.provide_optimization_suggestions("ko", strict)
    assert len(english) == len(korean) == 5
    assert "0.47" in english[0] and "0.1" in english[0]
    for one, other in zip(english, korean, strict=True):
        assert re.search("[가-힣]", other) and not re.search("[가-힣{}]", one) and "{" not in other
    with pytest.raises(RequestError, match="en or ko"):
        found.provide_optimization_suggestions("fr")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_cannot_be_is_refused(wrong):
    found = PerformanceTracker()
    with pytest.raises(RequestError):
        found.add_latency_data(wrong)
    with pytest.raises(RequestError):
        found.add_throughput_data(1, 0.0)
    with pytest.raises(RequestError, match="first"):
        found.summarize_performance()
    with pytest.raises(RequestError):
        PerformanceTracker(capacity=0)


def test_percentiles_are_of_the_nearest_rank():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]


def test_presets_name_their_purpose():
    assert set(PRESETS) == {"low_latency", "high_throughput", "memory_constrained"}
    assert PRESETS["low_latency"].batch_limit < PRESETS["high_throughput"].batch_limit
    assert all(set(preset.why) == {"en", "ko"} for preset in PRESETS.values())
