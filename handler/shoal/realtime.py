"""`RealtimeBatchProcessor`: requests that come one by one, gathered by number or by time, answered by callbacks.

Knows queues, clocks and callbacks; knows nothing of decoding.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import CancelledError, CapacityError, RequestError, ShoalError
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest, Utterance
from shoal.speech import FishSpeech, Speech, VoiceLike

log = logging.getLogger(__name__)

Callback = Callable[["Speech | ShoalError"], None]


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: SpeechRequest
    callback: Callback
    arrived: float  # time.monotonic()


class RealtimeBatchProcessor:
    """Batches requests as they arrive. Use it as a context manager, or `close` it.

    While nothing decodes, a first request waits for company: until `max_batch_capacity` have come, or for
    `max_wait_duration`, whichever is sooner. A thread of its own keeps that time, so a lone request needs no later one.
    While something decodes, newcomers join at once, as long as there is room.

    Args:
        max_batch_capacity: requests that decode at a time.
        max_wait_duration: seconds.
        max_queue: requests that may wait; beyond it `enqueue_request` refuses.
        voice, params: for requests that bring none of their own.
    """

    def __init__(
        self,
        model: FishSpeech,
        max_batch_capacity: int = 8,
        max_wait_duration: float = 0.1,
        *,
        max_queue: int = 64,
        voice: VoiceLike = None,
        params: SamplingParams = SamplingParams(),
        use_cache: bool = True,
    ) -> None:
        if max_batch_capacity < 1 or max_queue < 1 or max_wait_duration < 0:
            raise RequestError("max_batch_capacity and max_queue must be 1 or more, max_wait_duration 0 or more")
        self.max_batch_capacity, self.max_wait_duration, self.max_queue = (
            max_batch_capacity,
            max_wait_duration,
            max_queue,
        )
        self._scheduler = model.scheduler
        self._voice, self._params, self._use_cache = voice, params, use_cache
        self._queue: deque[_Waiting] = deque()
        self._closing = self._dropping = False
        self._changed = threading.Condition()
        self._running: list[tuple[Utterance, Callback]] = []  # touched by the worker alone
        self._worker = threading.Thread(target=self._work, name="shoal-realtime", daemon=True)
        self._worker.start()

    def enqueue_request(
        self, text: str, callback: Callback, voice: VoiceLike = None, params: SamplingParams | None = None
    ) -> None:
        """Queue a text. `callback` is called exactly once, in the processor's thread, with its Speech or its error.

        A slow callback holds up the others: hand long work to a thread of your own.

        Raises:
            CapacityError: `max_queue` requests are waiting; the callback is not called then.
            ShoalError: the processor is closed.
        """
        request = SpeechRequest(
            text,
            self._voice if voice is None else voice,
            self._params if params is None else params,
            use_cache=self._use_cache,
        )
        with self._changed:
            if self._closing:
                raise ShoalError("this RealtimeBatchProcessor is closed: make a new one")
            if len(self._queue) >= self.max_queue:
                raise CapacityError(f"{len(self._queue)} requests are waiting, which is the limit; try again later")
            self._queue.append(_Waiting(request, callback, time.monotonic()))
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Requests that do not decode yet."""
        return len(self._queue)

    def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those that came are answered.

        Args:
            drain: False ends them with CancelledError instead.
            timeout: longest wait in seconds; the work goes on after it.

        Returns:
            whether all are answered. (Called from a callback it does not wait, and returns False.)
        """
        with self._changed:
            self._closing = True
            self._dropping = self._dropping or not drain
            self._changed.notify_all()
        if threading.current_thread() is self._worker:
            return False
        self._worker.join(timeout)
        return not self._worker.is_alive()

    def __enter__(self) -> RealtimeBatchProcessor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def _work(self) -> None:
        while (batch := self._gather()) is not None:
            for waiting in batch:
                self._admit(waiting)
            if self._dropping:
                self._drop()
            if self._running:
                try:
                    self._scheduler.step()
                except Exception as error:  # not a request's fault, and no reason to leave anyone without an answer
                    self._fail_all(error)
                self._deliver()

    def _gather(self) -> list[_Waiting] | None:
        """The requests whose time has come; waits for them while nothing decodes. None: closed, and nothing is left."""
        with self._changed:
            if not self._running:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return None
                due = self._queue[0].arrived + self.max_wait_duration
                self._changed.wait_for(
                    lambda: len(self._queue) >= self.max_batch_capacity or self._closing,
                    timeout=max(0.0, due - time.monotonic()),
                )
            room = self.max_batch_capacity - len(self._running)
            return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def _admit(self, waiting: _Waiting) -> None:
        try:
            self._running.append((self._scheduler.submit(waiting.request), waiting.callback))
        except ShoalError as error:
            _answer(waiting.callback, error)
        except Exception as error:
            log.exception("a request could not be taken in")
            _answer(waiting.callback, ShoalError(f"the request failed: {type(error).__name__}: {error}"))

    def _deliver(self) -> None:
        done = [pair for pair in self._running if pair[0].done]
        self._running = [pair for pair in self._running if not pair[0].done]
        for utterance, callback in done:
            _answer(callback, utterance.error or utterance.result)

    def _drop(self) -> None:
        with self._changed:
            dropped = list(self._queue)
            self._queue.clear()
        for waiting in dropped:
            _answer(waiting.callback, CancelledError("the processor was closed before this request's turn"))
        for utterance, _ in self._running:
            self._scheduler.cancel(utterance, CancelledError("the processor was closed"))
        self._deliver()

    def _fail_all(self, error: Exception) -> None:
        log.exception("a step failed")
        for utterance, _ in self._running:
            self._scheduler.cancel(utterance, ShoalError(f"decoding failed: {type(error).__name__}: {error}"))


def _answer(callback: Callback, result: Speech | ShoalError) -> None:
    try:
        callback(result)
    except Exception:
        log.exception("a callback raised; its request is done all the same")
