"""Measures how long texts take to speak, one at a time and together. Knows models by their methods only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from shoal.sampling import SamplingParams
    from shoal.speech import FishSpeech


@dataclass(frozen=True, eq=False)
class Measurement:
    """One text, spoken."""

    text: str
    seconds: float  # that it took
    audio: np.ndarray  # (samples,) float32
    sample_rate: int

    @property
    def audio_seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    @property
    def real_time_factor(self) -> float:
        """Seconds of work per second of sound; below 1 is faster than real time."""
        return self.seconds / self.audio_seconds


@dataclass(frozen=True, eq=False)
class PerformanceReport:
    """All texts of one way of speaking them."""

    name: str
    measurements: tuple[Measurement, ...]
    total_seconds: float  # wall clock of the whole

    @property
    def audio_seconds(self) -> float:
        return sum(m.audio_seconds for m in self.measurements)

    @property
    def real_time_factor(self) -> float:
        return self.total_seconds / self.audio_seconds

    @property
    def mean_latency(self) -> float:
        """Seconds until a text's sound is there, on average."""
        return statistics.mean(m.seconds for m in self.measurements)

    @property
    def texts_per_second(self) -> float:
        return len(self.measurements) / self.total_seconds


def measure_initial_performance(
    texts: Sequence[str], model: Any, *, name: str = "one at a time", speak: Callable[..., Any] | None = None
) -> PerformanceReport:
    """Speak texts one after the other and time each: where every optimisation starts from.

    Args:
        model: FishSpeech, or UpstreamBaseline (upstream as shipped); anything with `synthesize` and `sample_rate`.
        speak: how to speak one text instead of `model.synthesize(text)`; FishSpeech leaves its cache out by default.
    """
    if speak is None:
        speak = _plain_speak(model)
    begin = time.perf_counter()
    measurements = []
    for text in texts:
        started = time.perf_counter()
        audio = _audio_of(speak(text))
        measurements.append(Measurement(text, time.perf_counter() - started, audio, model.sample_rate))
    return PerformanceReport(name, tuple(measurements), time.perf_counter() - begin)


def measure_together(
    texts: Sequence[str], model: FishSpeech, params: SamplingParams | None = None, *, name: str = "together"
) -> PerformanceReport:
    """Speak all texts in one batch; each text's latency is the whole batch's, as a caller of the batch sees it."""
    from shoal.sampling import SamplingParams

    begin = time.perf_counter()
    spoken = model.generate_batch(list(texts), params=params or SamplingParams(), use_cache=False)
    seconds = time.perf_counter() - begin
    measurements = tuple(
        Measurement(text, seconds, speech.audio, speech.sample_rate) for text, speech in zip(texts, spoken, strict=True)
    )
    return PerformanceReport(name, measurements, seconds)


def _plain_speak(model: Any) -> Callable[[str], Any]:
    from shoal.speech import FishSpeech

    if isinstance(model, FishSpeech):
        return lambda text: model.synthesize(text, use_cache=False)
    return model.synthesize


def _audio_of(result: Any) -> np.ndarray:
    return result if isinstance(result, np.ndarray) else result.audio
