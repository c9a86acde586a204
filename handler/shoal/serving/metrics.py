"""Request records -> the metrics that metrics.yaml declares. Of TorchServe it knows the metric cache's methods only."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shoal.monitoring import percentile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestRecord:
    """What became of one request, for metrics and logs."""

    request_id: str
    outcome: str  # ok, rejected (when it came in), failed (later) or cancelled
    status: int
    seconds: float  # wall clock, admission to the last reply
    first_audio_s: float | None = None  # wall clock, admission to the first sample
    queue_s: float | None = None  # wall clock, admission until its first sentence had a row; None: it needed none
    audio_seconds: float = 0.0
    batch_size: int = 0
    cache_hit: bool = False
    streamed: bool = False
    characters: int = 0  # of its text
    error: str | None = None  # what kind, of one that was not answered
    text: str | None = None  # its beginning, where the operator wants texts in logs

    def to_json(self) -> str:
        """One line for a log."""
        fields = {"event": "request"} | asdict(self)
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items() if v is not None}
        return json.dumps(rounded, ensure_ascii=False)

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of work per second of audio; None where no audio came out."""
        return self.seconds / self.audio_seconds if self.audio_seconds else None


@dataclass(frozen=True)
class ServiceState:
    """What a service holds and has done since its start, for gauges and counters."""

    live_rows: int
    waiting: int  # sentences that have no row
    batch_limit: int
    frames: int  # decoded so far, of all rows
    out_of_memory: int  # times that it ran out
    cache_bytes: dict[str, int]  # by tier, of those that know
    cache_hits: dict[str, int]  # by tier, so far
    cache_evictions: int  # from memory, so far
    memory_bytes: int  # of the process on a CPU, reserved of the card on a GPU


class Recent:
    """The requests that were answered lately, summed up for whoever asks: a dashboard, or what steers the limits.

    Args:
        window_s: how long a request counts.
        capacity: requests that are kept at most; the oldest leave.
    """

    def __init__(self, window_s: float = 10.0, capacity: int = 1000) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, RequestRecord]] = deque(maxlen=capacity)
        self._begin: float | None = None  # when the first came

    def add(self, now: float, record: RequestRecord) -> None:
        """Note a request that ended now; only what was answered counts."""
        if self._begin is None:
            self._begin = now - record.seconds
        if record.outcome == "ok":
            self._kept.append((now, record))

    def summary(self, now: float) -> dict[str, Any]:
        """Requests, percentiles of their seconds, texts per second, hit rate; all None where there was no request."""
        span = min(self._window_s, max(1e-3, now - self._begin)) if self._begin is not None else self._window_s
        records = [record for at, record in self._kept if now - at <= self._window_s]
        seconds = sorted(record.seconds for record in records)
        told: dict[str, Any] = {"window_s": self._window_s, "requests": len(records)}
        if not records:
            return told | dict.fromkeys(("p50_s", "p95_s", "texts_per_s", "audio_s_per_s", "hit_rate"))
        return told | {
            "p50_s": round(percentile(seconds, 0.5), 4),
            "p95_s": round(percentile(seconds, 0.95), 4),
            "texts_per_s": round(len(records) / span, 3),
            "audio_s_per_s": round(sum(record.audio_seconds for record in records) / span, 3),
            "hit_rate": round(sum(record.cache_hit for record in records) / len(records), 4),
        }


class MetricsEmitter:
    """Writes records to TorchServe's metric cache; metrics that the server's metrics.yaml lacks are left out."""

    def __init__(self, metrics: Any, model_name: str) -> None:
        self._cache = metrics
        self._model = model_name
        self._missing: set[str] = set()
        self._counted: dict[tuple[str, ...], int] = {}  # what counters have been told so far
        self._next_state = 0.0

    def emit(self, records: Iterable[RequestRecord]) -> None:
        """Count each record and note its times."""
        for record in records:
            self._add("COUNTER", "shoal_requests_total", 1, record.outcome, str(record.status))
            if record.outcome != "ok":
                continue
            self._add("COUNTER", "shoal_audio_seconds_total", round(record.audio_seconds, 3))
            self._add("COUNTER", "shoal_cache_hits_total", int(record.cache_hit))
            self._add("GAUGE", "shoal_batch_size", record.batch_size)
            if record.first_audio_s is not None:
                self._add("HISTOGRAM", "shoal_first_audio_seconds", round(record.first_audio_s, 4))
            if record.queue_s is not None:
                self._add("HISTOGRAM", "shoal_queue_seconds", round(record.queue_s, 4))
            self._add("HISTOGRAM", "shoal_request_seconds", round(record.seconds, 4))
            if record.real_time_factor is not None and not record.cache_hit:
                self._add("HISTOGRAM", "shoal_real_time_factor", round(record.real_time_factor, 4))

    def emit_state(self, state: Callable[[], ServiceState]) -> None:
        """Set the gauges, and count what has come to the counters; at most once a second."""
        if (now := time.monotonic()) < self._next_state:
            return
        self._next_state = now + 1.0
        found = state()
        self._add("GAUGE", "shoal_live_rows", found.live_rows)
        self._add("GAUGE", "shoal_waiting_sentences", found.waiting)
        self._add("GAUGE", "shoal_batch_limit", found.batch_limit)
        self._add("GAUGE", "shoal_memory_bytes", found.memory_bytes)
        for tier, held in found.cache_bytes.items():
            self._add("GAUGE", "shoal_cache_bytes", held, tier)
        self._count("shoal_frames_total", found.frames)
        self._count("shoal_out_of_memory_total", found.out_of_memory)
        self._count("shoal_cache_evictions_total", found.cache_evictions, "memory")
        for tier, hits in found.cache_hits.items():
            self._count("shoal_cache_tier_hits_total", hits, tier)

    def _count(self, name: str, total: int, *dimensions: str) -> None:
        """Add what a total has grown by since it was last told; a first 0 makes the counter known."""
        key = (name, *dimensions)
        grown = total - self._counted.get(key, 0)
        if grown or key not in self._counted:
            self._add("COUNTER", name, grown, *dimensions)
            self._counted[key] = total

    def _add(self, kind: str, name: str, value: float, *dimensions: str) -> None:
        if self._cache is None or name in self._missing:
            return
        from ts.metrics.metric_type_enum import MetricTypes

        try:
            metric = self._cache.get_metric(name, MetricTypes[kind])
        except Exception:  # the server runs with another metrics.yaml than ours
            self._missing.add(name)
            logger.info("metric %s is not declared in metrics.yaml and will not be reported", name)
            return
        metric.add_or_update(value, [self._model, *dimensions])
