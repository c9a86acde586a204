"""`PerformanceTracker`: what requests took lately, in numbers and in advice. Knows nothing of how speech is made."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.advice import ADVICE, Lang
from shoal.errors import RequestError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Sample:
    """One request, or one measurement of throughput or memory; what was not measured is None."""

    at: float  # seconds since the tracker was made
    latency_s: float | None = None
    audio_s: float | None = None
    cache_hit: bool | None = None
    batch_size: int | None = None
    texts_per_s: float | None = None
    gpu_bytes: int | None = None
    gpu_share: float | None = None


@dataclass(frozen=True)
class Thresholds:
    """From where on `provide_optimization_suggestions` says something."""

    latency_s: float = 1.0  # 95% of requests, above
    texts_per_s: float = 5.0  # below
    gpu_share: float = 0.9  # of the card's memory, above
    hit_rate: float = 0.3  # below, once there are `least` requests
    real_time_factor: float = 1.0  # above
    batch_size: float = 2.0  # on average, below, where requests queue
    least: int = 20  # requests before a hit rate or a batch means something


@dataclass(frozen=True)
class Summary:
    """Of what the ring buffers hold."""

    requests: int
    mean_latency_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    texts_per_s: float | None  # reported, else requests over the time they span
    real_time_factor: float | None  # seconds of work per second of sound
    hit_rate: float | None
    mean_batch: float | None
    gpu_bytes: int | None  # the most that was seen
    gpu_share: float | None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value, for a table; what is not known is left out."""
        names = {
            "requests": "requests",
            "mean_latency_s": "mean latency (s)",
            "p50_s": "p50 (s)",
            "p95_s": "p95 (s)",
            "p99_s": "p99 (s)",
            "texts_per_s": "texts per second",
            "real_time_factor": "real-time factor",
            "hit_rate": "hit rate",
            "mean_batch": "mean batch",
            "gpu_bytes": "GPU memory, most (bytes)",
            "gpu_share": "GPU memory, share",
        }
        values = asdict(self)
        return [(name, f"{values[key]:.4g}") for key, name in names.items() if values[key] is not None]


class PerformanceTracker:
    """Keeps the last `capacity` requests and measurements, for any number of threads.

    Args:
        capacity: of each ring buffer; older ones leave.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int = 1000, *, clock: Any = time.monotonic) -> None:
        if capacity < 1:
            raise RequestError(f"a tracker that keeps {capacity} samples keeps nothing: use 1 or more")
        self._requests: deque[Sample] = deque(maxlen=capacity)
        self._others: deque[Sample] = deque(maxlen=capacity)
        self._clock, self._begin = clock, clock()
        self._lock = threading.Lock()

    def add_latency_data(
        self,
        latency_s: float,
        *,
        audio_s: float | None = None,
        cache_hit: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Note one request: seconds until its whole sound, and what else is known of it.

        Raises:
            RequestError: a latency that is no number of seconds.
        """
        if not math.isfinite(latency_s) or latency_s < 0:
            raise RequestError(f"a latency of {latency_s!r} seconds cannot be")
        self._keep(self._requests, latency_s=latency_s, audio_s=audio_s, cache_hit=cache_hit, batch_size=batch_size)

    def add_throughput_data(self, texts: int, seconds: float) -> None:
        """Note how many texts were done in how many seconds."""
        if seconds <= 0:
            raise RequestError(f"{texts} texts in {seconds!r} seconds cannot be")
        self._keep(self._others, texts_per_s=texts / seconds)

    def capture_gpu_memory_usage(self) -> int | None:
        """Note the GPU's memory in use, of all programs on it; returns the bytes, or None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        self._keep(self._others, gpu_bytes=total - free, gpu_share=(total - free) / total)
        return total - free

    def summarize_performance(self) -> Summary:
        """Of what is kept now. Raises RequestError while there is no request."""
        with self._lock:
            requests, others = list(self._requests), list(self._others)
        if not requests:
            raise RequestError("no request has been noted yet: call add_latency_data first")
        latencies = sorted(s.latency_s for s in requests)
        hits = [s.cache_hit for s in requests if s.cache_hit is not None]
        batches = [s.batch_size for s in requests if s.batch_size]
        sounds = [s for s in requests if s.audio_s]
        rates = [s.texts_per_s for s in others if s.texts_per_s is not None]
        span = requests[-1].at - requests[0].at
        return Summary(
            requests=len(requests),
            mean_latency_s=sum(latencies) / len(latencies),
            p50_s=percentile(latencies, 0.5),
            p95_s=percentile(latencies, 0.95),
            p99_s=percentile(latencies, 0.99),
            texts_per_s=sum(rates) / len(rates) if rates else (len(requests) - 1) / span if span > 0 else None,
            real_time_factor=sum(s.latency_s for s in sounds) / sum(s.audio_s for s in sounds) if sounds else None,
            hit_rate=sum(hits) / len(hits) if hits else None,
            mean_batch=sum(batches) / len(batches) if batches else None,
            gpu_bytes=max((s.gpu_bytes for s in others if s.gpu_bytes is not None), default=None),
            gpu_share=max((s.gpu_share for s in others if s.gpu_share is not None), default=None),
        )

    def provide_optimization_suggestions(self, lang: Lang = "en", thresholds: Thresholds = Thresholds()) -> list[str]:
        """What the figures advise, in words; one line that all is well where nothing stands out.

        Raises:
            RequestError: no request has been noted, or an unknown language.
        """
        if lang not in ("en", "ko"):
            raise RequestError(f"no suggestions in {lang!r}: use en or ko")
        found, bounds = self.summarize_performance(), thresholds
        enough = found.requests >= bounds.least
        checks = (
            ("latency", found.p95_s > bounds.latency_s, bounds.latency_s),
            ("throughput", (found.texts_per_s or math.inf) < bounds.texts_per_s, bounds.texts_per_s),
            ("memory", (found.gpu_share or 0) > bounds.gpu_share, bounds.gpu_share),
            ("hits", enough and found.hit_rate is not None and found.hit_rate < bounds.hit_rate, bounds.hit_rate),
            ("real_time", (found.real_time_factor or 0) > bounds.real_time_factor, bounds.real_time_factor),
            ("batch", enough and (found.mean_batch or math.inf) < bounds.batch_size, bounds.batch_size),
        )
        said = [ADVICE[name][lang].format(limit=limit, **asdict(found)) for name, holds, limit in checks if holds]
        return said or [ADVICE["fine"][lang]]

    def samples(self) -> list[Sample]:
        """All that is kept, in the order of time."""
        with self._lock:
            return sorted([*self._requests, *self._others], key=lambda s: s.at)

    def to_json(self) -> str:
        """Samples and summary."""
        summary = asdict(self.summarize_performance()) if self._requests else None
        return json.dumps({"summary": summary, "samples": [asdict(s) for s in self.samples()]})

    def to_csv(self) -> str:
        """One line per sample, with a header."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(Sample.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(s) for s in self.samples())
        return out.getvalue()

    def to_pandas(self) -> pandas.DataFrame:
        """One row per sample. Raises ModuleNotFoundError without pandas (it is in the extra `notebooks`)."""
        import pandas

        return pandas.DataFrame([asdict(s) for s in self.samples()], columns=list(Sample.__dataclass_fields__))

    def _keep(self, buffer: deque[Sample], **values: Any) -> None:
        with self._lock:
            buffer.append(Sample(self._clock() - self._begin, **values))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in rising order, by the nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True)
class Preset:
    """Settings for one purpose."""

    batch_limit: int
    wait_s: float  # for company, before a batch begins
    cache_bytes: str
    stream: bool
    why: dict[Lang, str] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "low_latency": Preset(
        2, 0.01, "256MB", True, {"en": "one listener hears something soon", "ko": "한 사람이 바로 듣습니다"}
    ),
    "high_throughput": Preset(
        16, 0.1, "1GB", False, {"en": "most texts per second", "ko": "초당 가장 많은 문장을 처리합니다"}
    ),
    "memory_constrained": Preset(2, 0.05, "64MB", False, {"en": "little memory", "ko": "메모리를 적게 씁니다"}),
}
