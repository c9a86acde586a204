"""Finds settings by trying them, and keeps a limit in step with the load. Knows what is measured, not how it is made.

`tune` tries settings on a replayed trace of arrivals against an objective. `LimitController` moves a live batch limit
up and down as latencies come in: one step at a time, with a band in which it stays, and a rest after each move, so that
it settles instead of swinging.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.arrivals import Arrival, replay
from shoal.errors import CancelledError, RequestError
from shoal.monitoring import percentile
from shoal.realtime import RealtimeBatchProcessor
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech, Speech


@dataclass(frozen=True)
class Settings:
    """What `tune` varies."""

    batch_limit: int
    wait_s: float
    cache_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one trial gave."""

    p95_s: float
    texts_per_s: float
    failed: int = 0


@dataclass(frozen=True)
class Objective:
    """What is wanted: most texts per second, with 95% of requests within `p95_s` where it is given."""

    p95_s: float | None = None

    def better(self, one: Outcome, other: Outcome) -> bool:
        """Whether `one` is to be preferred: no failures, then within the bound, then more throughput or less delay."""
        return self._rank(one) > self._rank(other)

    def met(self, outcome: Outcome) -> bool:
        return not outcome.failed and (self.p95_s is None or outcome.p95_s <= self.p95_s)

    def _rank(self, outcome: Outcome) -> tuple[float, ...]:
        if self.met(outcome):
            return (1, outcome.texts_per_s)
        return (0, -outcome.failed, -outcome.p95_s)


@dataclass(frozen=True)
class Tuned:
    """The best settings of those tried, all trials, and whether the objective was met."""

    best: Settings
    trials: tuple[tuple[Settings, Outcome], ...]
    met: bool

    @property
    def outcome(self) -> Outcome:
        return dict(self.trials)[self.best]


Trial = Callable[[Settings], Outcome]


def tune(
    trial: Trial,
    *,
    batch_limits: Sequence[int] = (1, 2, 4, 8, 16),
    waits_s: Sequence[float] = (0.0, 0.02, 0.1),
    cache_bytes: Sequence[int] = (0,),
    objective: Objective = Objective(),
    most_trials: int = 24,
    progress: Callable[[int, int, str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Tuned:
    """Coordinate search: the best batch limit, then wait, then cache, then once more around what was found.

    A tie goes to the smaller setting. At most `most_trials` trials; each setting is tried once.

    Raises:
        RequestError: nothing to try. CancelledError: cancelled before the first trial had ended.
    """
    axes = (sorted(set(batch_limits)), sorted(set(waits_s)), sorted(set(cache_bytes)))
    if not all(axes) or most_trials < 1:
        raise RequestError("there is nothing to try: name at least one batch limit, wait, cache size and trial")
    done: dict[Settings, Outcome] = {}
    current = [axes[0][len(axes[0]) // 2], axes[1][0], axes[2][0]]
    total = min(most_trials, sum(map(len, axes)))

    def best() -> Settings:
        found = next(iter(done))
        for settings, outcome in sorted(done.items(), key=lambda item: (item[0].batch_limit, item[0].wait_s)):
            if objective.better(outcome, done[found]):
                found = settings
        return found

    for round_ in range(2):
        for axis, values in enumerate(axes):
            for value in values:
                place = [*current]
                place[axis] = value
                settings = Settings(*place)
                if settings in done or len(done) >= most_trials:
                    continue
                if cancel is not None and cancel.is_set():
                    if not done:
                        raise CancelledError("tuning was cancelled before its first trial")
                    return Tuned(best(), tuple(done.items()), objective.met(done[best()]))
                if progress:
                    progress(len(done), max(total, len(done) + 1), f"round {round_ + 1}: {settings}")
                try:
                    done[settings] = trial(settings)
                except CancelledError:
                    if not done:
                        raise
                    return Tuned(best(), tuple(done.items()), objective.met(done[best()]))
            current = [best().batch_limit, best().wait_s, best().cache_bytes]
    return Tuned(best(), tuple(done.items()), objective.met(done[best()]))


def replay_trial(
    model: FishSpeech,
    arrivals: Sequence[Arrival],
    params: SamplingParams | None = None,
    cancel: threading.Event | None = None,
) -> Trial:
    """A trial that sends a trace of arrivals to a `RealtimeBatchProcessor` of these settings, with an empty cache."""

    def run(settings: Settings) -> Outcome:
        model.cache.clear()
        model.cache.set_capacity(settings.cache_bytes)
        model.scheduler.batch_limit = settings.batch_limit
        processor = RealtimeBatchProcessor(
            model, max_batch_capacity=settings.batch_limit, max_wait_duration=settings.wait_s
        )
        begin = time.monotonic()
        try:
            answers = replay(processor, arrivals, params, cancel=cancel)
        finally:
            processor.close()
        if cancel is not None and cancel.is_set():
            raise CancelledError("the trial was cut off")  # what it measured means nothing
        spoken = [a for a in answers if isinstance(a.result, Speech)]
        latencies = sorted(a.latency for a in spoken) or [float("inf")]
        seconds = max(1e-9, time.monotonic() - begin)
        return Outcome(percentile(latencies, 0.95), len(spoken) / seconds, len(answers) - len(spoken))

    return run


class LimitController:
    """Moves a batch limit as load changes, within bounds, without swinging.

    When 95% of requests take longer than `p95_s` it goes one step, a factor of two: to more rows where requests wait,
    to fewer where they decode too slowly with nobody waiting. Within `slack` below the bound it goes up only. After a
    move it rests for `rest` observations. It turns round once for a load: if that was no better it stays, until the
    load (requests that wait or decode) is another by more than half.

    Args:
        least, most: bounds of the limit.
        p95_s: what 95% of requests should stay under.
    """

    def __init__(
        self, limit: int, *, least: int = 1, most: int = 16, p95_s: float = 1.0, slack: float = 0.3, rest: int = 3
    ) -> None:
        if not 1 <= least <= limit <= most:
            raise RequestError(f"a limit of {limit} is not within {least} to {most}")
        self.limit, self._least, self._most = limit, least, most
        self._bound, self._slack, self._rest = p95_s, slack, rest
        self._resting = 0
        self._direction = 0  # of the last move
        self._load = 0.0  # that the moves so far were for
        self._turns = 0  # made for it

    def observe(self, p95_s: float, waiting: int, live: int) -> int:
        """Take in one window of measurements; returns the limit that should hold now.

        p95_s: of the requests that ended in the window; waiting: that have no row; live: rows that decode.
        """
        load = float(waiting + live)
        if abs(load - self._load) > 0.5 * max(self._load, 1.0):
            self._load, self._turns, self._direction = load, 0, 0
        if self._resting:
            self._resting -= 1
            return self.limit
        wanted = 0
        if p95_s > self._bound:
            wanted = 1 if waiting > 0 else -1
        elif waiting > live and p95_s > (1 - self._slack) * self._bound:
            wanted = 1
        if wanted and wanted == -self._direction:
            self._turns += 1
        if wanted and self._turns < 2:
            self._move(wanted)
        return self.limit

    def _move(self, direction: int) -> None:
        target = min(self._most, max(self._least, self.limit * 2 if direction > 0 else self.limit // 2))
        if target != self.limit:
            self.limit, self._resting, self._direction = target, self._rest, direction


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({*itertools.takewhile(lambda n: n <= most, (2**i for i in range(32))), most})
