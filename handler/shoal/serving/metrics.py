"""Request records -> the metrics that metrics.yaml declares. Of TorchServe it knows the metric cache's methods only."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

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
