"""`OptimizedSpeechPipeline`: many texts in, speech in the same order out; what is known comes from the cache.

Knows texts, order and errors; what is decoded when, and that equal texts decode once, is the scheduler's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal.errors import CancelledError, CapacityError, RequestError, ShoalError
from shoal.sampling import SamplingParams
from shoal.scheduler import Scheduler, SpeechRequest, Utterance
from shoal.speech import FishSpeech, Speech, VoiceLike, one_each

Progress = Callable[[int, "int | None"], None]  # results so far, results in all (None: not known)

# Results that wait for a slower one before them, and hits that wait for their sound, in batches: bounds the memory.
_AHEAD = 4


class OptimizedSpeechPipeline:
    """Speaks lists of texts, long ones in bounded memory. Thread-safe.

    Args:
        default_batch_size: texts that decode at a time; those that the cache knows do not count.
        enable_feature_caching: False decodes every text, and keeps nothing.
    """

    def __init__(self, model: FishSpeech, default_batch_size: int = 4, enable_feature_caching: bool = True) -> None:
        _check_batch_size(default_batch_size)
        self.model = model
        self.default_batch_size = default_batch_size
        self.enable_feature_caching = enable_feature_caching

    def generate_optimized_speech(
        self,
        texts: Sequence[str],
        voice: VoiceLike | Sequence[VoiceLike] = None,
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Speech | ShoalError]:
        """Speak all texts. The result has one slot per text: its speech, or the error that befell this text alone.

        Args:
            voice, params: one for all texts, or one each.
            progress: called in this thread after each result, with the number so far and the number in all.
            cancel: once set, what is not done ends; its slots hold CancelledError.

        Raises:
            RequestError: voices or parameters are neither one nor one each, or the batch size is below one.
        """
        voices, kinds = one_each(voice, len(texts), "voice"), one_each(params, len(texts), "params")
        requests = (self._request(t, v, p) for t, v, p in zip(texts, voices, kinds, strict=True))
        results = list(self._run(requests, batch_size, len(texts), progress, cancel))
        left = len(texts) - len(results)
        return results + [CancelledError("the call was cancelled before this text's turn") for _ in range(left)]

    def iter_optimized_speech(
        self,
        texts: Iterable[str],
        voice: VoiceLike = None,
        params: SamplingParams = SamplingParams(),
        *,
        batch_size: int | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Speech | ShoalError]:
        """Speak texts as they are asked for: results in order, a few batches ahead at most, whatever the length.

        Decoding goes on only while the next result is awaited. Closing the iterator, or setting `cancel`, ends what is
        under way; after `cancel` it yields CancelledError for what it had begun, and stops.
        """
        requests = (self._request(text, voice, params) for text in texts)
        return self._run(requests, batch_size, None, progress, cancel)

    def _request(self, text: str, voice: VoiceLike, params: SamplingParams) -> SpeechRequest:
        return SpeechRequest(text, voice, params, use_cache=self.enable_feature_caching)

    def _run(
        self,
        requests: Iterable[SpeechRequest],
        batch_size: int | None,
        total: int | None,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> Iterator[Speech | ShoalError]:
        size = self.default_batch_size if batch_size is None else batch_size
        _check_batch_size(size)
        results = run_in_order(self.model.scheduler, requests, size, cancel)
        return _told(results, total, progress) if progress else results


def run_in_order(
    scheduler: Scheduler, requests: Iterable[SpeechRequest], batch_size: int, cancel: threading.Event | None = None
) -> Iterator[Speech | ShoalError]:
    """Results in the order of the requests, `batch_size` of them decoding at a time; requests are read as needed."""
    source = iter(requests)
    window: deque[Utterance | ShoalError] = deque()  # submitted, not yet yielded
    upcoming = next(source, None)
    try:
        while True:
            stopped = cancel is not None and cancel.is_set()
            while upcoming is not None and not stopped and _has_room(window, batch_size):
                submitted = _submit(scheduler, upcoming)
                if submitted is None:
                    break  # others fill the scheduler: a step makes room
                window.append(submitted)
                upcoming = next(source, None)
            if stopped:
                _cancel_all(scheduler, window)
            if window and (result := _outcome(window[0])) is not None:
                window.popleft()
                yield result
            elif window or (upcoming is not None and not stopped):
                scheduler.step()
            else:
                return
    finally:
        _cancel_all(scheduler, window)


def _has_room(window: Sequence[Utterance | ShoalError], batch_size: int) -> bool:
    decoding = sum(isinstance(item, Utterance) and item.decoding for item in window)
    return decoding < batch_size and len(window) < _AHEAD * batch_size


def _submit(scheduler: Scheduler, request: SpeechRequest) -> Utterance | ShoalError | None:
    try:
        return scheduler.submit(request)
    except CapacityError:
        return None
    except ShoalError as error:
        return error


def _outcome(item: Utterance | ShoalError) -> Speech | ShoalError | None:
    return (item.error or item.result) if isinstance(item, Utterance) else item


def _cancel_all(scheduler: Scheduler, window: Iterable[Utterance | ShoalError]) -> None:
    for item in window:
        if isinstance(item, Utterance):
            scheduler.cancel(item)


def _told(
    results: Iterable[Speech | ShoalError], total: int | None, progress: Progress
) -> Iterator[Speech | ShoalError]:
    for done, result in enumerate(results, start=1):
        progress(done, total)
        yield result


def _check_batch_size(size: int) -> None:
    if size < 1:
        raise RequestError(f"a batch of {size} texts cannot be decoded: use 1 or more")
