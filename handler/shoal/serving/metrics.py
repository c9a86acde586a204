"""Request records -> the metrics that metrics.yaml declares. Of TorchServe it knows the metric cache's methods only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
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
    audio_seconds: float = 0.0
    batch_size: int = 0
    cache_hit: bool = False

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of work per second of audio; None where no audio came out."""
        return self.seconds / self.audio_seconds if self.audio_seconds else None


class MetricsEmitter:
    """Writes records to TorchServe's metric cache; metrics that the server's metrics.yaml lacks are left out."""

    def __init__(self, metrics: Any, model_name: str) -> None:
        self._cache = metrics
        self._model = model_name
        self._missing: set[str] = set()

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
            if record.real_time_factor is not None and not record.cache_hit:
                self._add("HISTOGRAM", "shoal_real_time_factor", round(record.real_time_factor, 4))

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
