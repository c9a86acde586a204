"""Requests that come one by one, as callers send them: made up by rate, and replayed against a RealtimeBatchProcessor.

Knows clocks and callbacks; knows nothing of decoding.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import RequestError, ShoalError
from shoal.realtime import RealtimeBatchProcessor
from shoal.sampling import SamplingParams
from shoal.speech import Speech


@dataclass(frozen=True)
class Arrival:
    """One request to come."""

    at: float  # seconds after the start
    text: str


@dataclass(frozen=True, eq=False)
class Answer:
    """One request that came, and its answer."""

    number: int  # in the order of arrival, from 0
    text: str
    arrived: float  # seconds after the start
    answered: float
    result: Speech | ShoalError

    @property
    def latency(self) -> float:
        """Seconds from arrival to the whole sound."""
        return self.answered - self.arrived

    @property
    def batch_size(self) -> int:
        """The largest batch that it decoded in; 0 for an error, or an answer from the cache."""
        return self.result.batch_size if isinstance(self.result, Speech) else 0


def poisson_arrivals(texts: Sequence[str], count: int, rate: float, seed: int = 0) -> list[Arrival]:
    """`count` requests at `rate` a second on average, independent of each other, their texts in turn.

    Raises:
        RequestError: no texts, or a rate that is not above 0.
    """
    if not texts or rate <= 0 or count < 0:
        raise RequestError("arrivals need at least one text, a rate above 0 and a count of 0 or more")
    draw, at, arrivals = random.Random(seed), 0.0, []
    for i in range(count):
        arrivals.append(Arrival(at, texts[i % len(texts)]))
        at += draw.expovariate(rate)
    return arrivals


def zipf_requests(texts: Sequence[str], count: int, exponent: float = 1.0, seed: int = 0) -> list[str]:
    """`count` texts drawn by Zipf's law: the n-th of them comes n ** exponent times less often than the first.

    Raises:
        RequestError: no texts, or a negative exponent or count.
    """
    if not texts or exponent < 0 or count < 0:
        raise RequestError("requests need at least one text, and an exponent and a count of 0 or more")
    weights = [1 / rank**exponent for rank in range(1, len(texts) + 1)]
    return random.Random(seed).choices(texts, weights, k=count)


def replay(
    processor: RealtimeBatchProcessor,
    arrivals: Sequence[Arrival],
    params: SamplingParams | None = None,
    *,
    on_answer: Callable[[Answer], None] | None = None,
    cancel: threading.Event | None = None,
) -> list[Answer]:
    """Send each request at its time, whether earlier ones are answered or not, and wait for all answers.

    Args:
        params: for all requests; None: the processor's own.
        on_answer: called after each answer, in the processor's thread.
        cancel: once set, no more are sent; those under way are awaited, unless the processor is closed meanwhile.

    Returns:
        the answers in the order of arrival; a request that found the queue full has its CapacityError at once.
    """
    cancel = cancel or threading.Event()
    answers: list[Answer] = []
    changed = threading.Condition()
    begin = time.monotonic()
    sent = 0

    def answer(number: int, arrival: Arrival, arrived: float, result: Speech | ShoalError) -> None:
        done = Answer(number, arrival.text, arrived, time.monotonic() - begin, result)
        with changed:
            answers.append(done)
            changed.notify_all()
        if on_answer:
            on_answer(done)

    for number, arrival in enumerate(arrivals):
        if cancel.wait(max(0.0, arrival.at - (time.monotonic() - begin))):
            break
        arrived = time.monotonic() - begin
        sent += 1
        try:
            processor.enqueue_request(
                arrival.text, lambda result, n=number, a=arrival, t=arrived: answer(n, a, t, result), params=params
            )
        except ShoalError as error:  # the queue is full, or somebody closed the processor
            answer(number, arrival, arrived, error)
    with changed:
        changed.wait_for(lambda: len(answers) == sent)
    return sorted(answers, key=lambda a: a.number)
