"""Speech in batches, and the batch size that suits a model on this machine. Knows models by their methods only.

The search speaks the same texts with the same seeds at every size, so what differs is the size alone. Rounds go through
all sizes in turn, and medians are compared: a busy neighbour then disturbs every size alike.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import CancelledError, OutOfMemoryError, RequestError, ShoalError
from shoal.memory import memory_in_use
from shoal.pipeline import OptimizedSpeechPipeline, Progress
from shoal.results import Result, new_result, save_result
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech, VoiceLike

CANDIDATES = (1, 2, 4, 8, 16, 32)  # the guide's

SearchProgress = Callable[[int, int, str], None]  # runs done, runs in all, what runs now


def generate_speech_in_batches(
    texts: Sequence[str],
    model: FishSpeech,
    batch_limit: int = 4,
    voice: VoiceLike | Sequence[VoiceLike] = None,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    use_cache: bool = False,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> list[Speech | ShoalError]:
    """Speak all texts, at most `batch_limit` at a time; a text that ends makes room for the next at once.

    Args:
        voice, params: one for all texts, or one each.
        use_cache: look utterances up, and keep them; left out by default, so that batching alone is seen.
        progress: called after each result with the number so far and the number in all.
        cancel: once set, what is not done ends.

    Returns:
        one slot per text, in order: its speech, or the error that befell this text alone.

    Raises:
        RequestError: a batch limit below one; voices or parameters are neither one nor one each.
    """
    pipeline = OptimizedSpeechPipeline(model, batch_limit, enable_feature_caching=use_cache)
    return pipeline.generate_optimized_speech(texts, voice, params, progress=progress, cancel=cancel)


@dataclass(frozen=True)
class BatchMeasurement:
    """All texts at one batch size."""

    batch_size: int
    seconds: tuple[float, ...]  # wall clock of each round; empty where memory did not suffice
    audio_seconds: float  # of sound that a round made
    texts: int
    memory_bytes: int  # most that was seen in use at the ends of its rounds: process on a CPU, reserved on a GPU

    @property
    def out_of_memory(self) -> bool:
        return not self.seconds

    @property
    def median_seconds(self) -> float:
        """Infinite where memory did not suffice."""
        return statistics.median(self.seconds) if self.seconds else float("inf")

    @property
    def throughput(self) -> float:
        """Seconds of sound per second; 0 where memory did not suffice."""
        return self.audio_seconds / self.median_seconds

    @property
    def texts_per_second(self) -> float:
        return self.texts / self.median_seconds


@dataclass(frozen=True)
class BatchSearch:
    """What `search_batch_sizes` measured."""

    measurements: tuple[BatchMeasurement, ...]
    tolerance: float
    left_out: tuple[int, ...] = ()  # sizes above what the model was loaded for, or above one that ran out of memory
    cancelled: bool = False

    @property
    def best(self) -> int:
        """The smallest size whose throughput is within `tolerance` of the highest: what more rows add must be worth
        their memory and the longer wait.

        Raises:
            ShoalError: nothing was measured.
        """
        measured = [m for m in self.measurements if not m.out_of_memory]
        if not measured:
            raise ShoalError("no batch size could be measured: not even the smallest candidate fitted into memory")
        enough = (1 - self.tolerance) * max(m.throughput for m in measured)
        return min(m.batch_size for m in measured if m.throughput >= enough)

    def rows(self) -> list[tuple[Any, ...]]:
        """(batch size, seconds, texts per second, seconds of sound per second, memory in MB, remark) for a table."""
        rows: list[tuple[Any, ...]] = []
        for m in self.measurements:
            if m.out_of_memory:
                rows.append((m.batch_size, "-", "-", "-", "-", "out of memory"))
                continue
            remark = "best" if m.batch_size == self.best else ""
            figures = (m.median_seconds, m.texts_per_second, m.throughput)
            rows.append((m.batch_size, *figures, round(m.memory_bytes / 1e6), remark))
        return rows

    def to_result(self, **parameters: Any) -> Result:
        """A record to keep, to compare and to report (`shoal.results`), with the machine that it was measured on."""
        rows = [
            {
                "batch size": m.batch_size,
                "seconds": None if m.out_of_memory else m.median_seconds,
                "texts per second": None if m.out_of_memory else m.texts / m.median_seconds,
                "memory (MB)": m.memory_bytes / 1e6,
                "out of memory": m.out_of_memory,
            }
            for m in self.measurements
        ]
        found = any(not m.out_of_memory for m in self.measurements)
        title = f"Batch sizes: {self.best} is best" if found else "Batch sizes: memory sufficed for none"
        return new_result("batch_search", title, rows, "batch size", parameters)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with the machine that it was measured on."""
        save_result(self.to_result(), path)


def find_best_batch_size(model: FishSpeech, texts: Sequence[str], **options: Any) -> int:
    """The batch size to use for texts like these: `search_batch_sizes(model, texts, **options).best`."""
    return search_batch_sizes(model, texts, **options).best


def search_batch_sizes(
    model: FishSpeech,
    texts: Sequence[str],
    *,
    candidates: Sequence[int] = CANDIDATES,
    repeats: int = 3,
    tolerance: float = 0.05,
    voice: VoiceLike = None,
    params: SamplingParams = SamplingParams(seed=0),
    progress: SearchProgress | None = None,
    cancel: threading.Event | None = None,
    save_to: str | Path | None = None,
) -> BatchSearch:
    """Measure batch sizes, the smallest first, until one runs out of memory or none is left.

    Each size warms up first, which is not counted, and gives its memory back afterwards. Run it while nothing else
    uses the model: the model's own batch limit is moved, and put back at the end.

    Args:
        texts: what is spoken; repeated, with other seeds, where there are fewer than the largest candidate.
        candidates: sizes above the model's `max_batch_size` are left out.
        repeats: rounds; the median counts.
        tolerance: a smaller size wins if it has at least (1 - tolerance) of the best throughput.
        params: `seed` is that of the first text; the others count on from it.
        progress: called in this thread before each run.
        cancel: once set, the current run ends, and the result holds the complete rounds so far.
        save_to: a file for the result as JSON.

    Raises:
        RequestError: no texts, or candidates, repeats or tolerance that make no sense; or a text cannot be spoken.
        CancelledError: cancelled before anything was measured.
        ShoalError: decoding failed for another reason than memory.
    """
    sizes = sorted(set(candidates))
    if not texts or not sizes or sizes[0] < 1 or repeats < 1 or not 0 <= tolerance < 1:
        raise RequestError("give at least one text, candidates and repeats of 1 or more, and a tolerance from 0 to 1")
    fitting = [size for size in sizes if size <= model.max_batch_size]
    if not fitting:
        raise RequestError(f"all candidates are above the model's {model.max_batch_size} rows: load it with more")
    search = _Search(model, texts, fitting, repeats, voice, params, progress, cancel)
    limit = model.scheduler.batch_limit
    try:
        search.run()
    finally:
        model.scheduler.batch_limit = limit
        model.release_memory()
    measured = search.measurements()
    left_out = tuple(size for size in sizes if size not in {m.batch_size for m in measured})
    result = BatchSearch(measured, tolerance, left_out, search.cancelled)
    if search.cancelled and all(m.out_of_memory for m in measured):
        raise CancelledError("the search was cancelled before any batch size was measured")
    if save_to:
        result.save(save_to)
    return result


class _Search:
    """One search under way."""

    def __init__(
        self,
        model: FishSpeech,
        texts: Sequence[str],
        sizes: list[int],
        repeats: int,
        voice: VoiceLike,
        params: SamplingParams,
        progress: SearchProgress | None,
        cancel: threading.Event | None,
    ) -> None:
        self._model, self._voice, self._repeats = model, voice, repeats
        self._sizes, self._rounds = sizes, {size: [] for size in sizes}  # seconds
        self._memory, self._audio_seconds = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0.0)
        self._failed: int | None = None  # the size that ran out of memory
        self._progress, self._cancel = progress, cancel or threading.Event()
        self.cancelled = False
        count = max(len(texts), sizes[-1])
        self._texts = [texts[i % len(texts)] for i in range(count)]
        seed = params.resolve_seed()
        self._params = [replace(params, seed=seed + i) for i in range(count)]
        self._done, self._total = 0, len(sizes) * (1 + repeats)

    def run(self) -> None:
        for round_ in range(1 + self._repeats):  # the first one warms up, and finds where memory ends
            for size in self._sizes:
                if self._failed is not None and size >= self._failed:
                    break
                self._tell(f"batch {size}, {'warm-up' if not round_ else f'round {round_} of {self._repeats}'}")
                try:
                    self._run_once(size, warm_up=not round_)
                except OutOfMemoryError:
                    self._failed = size
                    self._rounds[size] = []
                    self._model.release_memory()
                    break
                except CancelledError:
                    self.cancelled = True
                    return

    def measurements(self) -> tuple[BatchMeasurement, ...]:
        found = []
        for size in self._sizes:
            if self._rounds[size] or size == self._failed:
                seconds = tuple(self._rounds[size])
                audio, memory = self._audio_seconds[size], self._memory[size]
                found.append(BatchMeasurement(size, seconds, audio, len(self._texts), memory))
        return tuple(found)

    def _run_once(self, size: int, *, warm_up: bool) -> None:
        self._model.scheduler.batch_limit = size
        count = size if warm_up else len(self._texts)
        ran_out = self._model.scheduler.out_of_memory
        begin = time.perf_counter()
        results = generate_speech_in_batches(
            self._texts[:count], self._model, size, self._voice, self._params[:count], cancel=self._cancel
        )
        seconds = time.perf_counter() - begin
        for result in results:
            if isinstance(result, ShoalError):
                raise _as_memory_error(result)
        if self._model.scheduler.out_of_memory > ran_out:  # the texts were spoken all the same, fewer at a time
            raise OutOfMemoryError(f"memory ran out with {size} at a time")
        if not warm_up:
            self._rounds[size].append(seconds)
            self._audio_seconds[size] = sum(speech.seconds for speech in results)
        self._memory[size] = max(self._memory[size], memory_in_use(self._model.device))

    def _tell(self, what: str) -> None:
        if self._progress:
            self._progress(self._done, self._total, what)
        self._done += 1


def _as_memory_error(error: ShoalError) -> ShoalError:
    """The CPU's allocator raises a RuntimeError, which arrives here as decoding that failed."""
    words = str(error).lower()
    if "allocate memory" in words or "memoryerror" in words or "out of memory" in words:
        return error if isinstance(error, OutOfMemoryError) else OutOfMemoryError(str(error))
    return error
