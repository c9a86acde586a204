"""Sentences' codes -> their sound, beside the decoding: codec workers that the scheduler feeds and collects from.

Knows sentences and the codec; knows nothing of requests, the engine or caches. On a CPU each worker computes on one
thread, since the codec's many small layers share a core far better between sentences than within one. On a GPU there is
one worker with a stream of its own, so that the codec overlaps the language model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.joining import fade_in, fade_out, silence
from shoal.model.firefly import Firefly
from shoal.utterance import Sentence
from shoal.windows import decode_windows


@dataclass(frozen=True, eq=False)
class _Passage:
    """Frames of one sentence that are to sound."""

    sentence: Sentence
    end: int  # up to this frame
    codes: Tensor  # (num_codebooks, context + frames) on the host
    start: int  # the first frame in `codes` to make sound of


class SoundMaker:
    """Makes the sound of sentences. Only the thread that steps the scheduler calls it.

    Args:
        workers: passages that are made at a time beside the calling thread; 0: the calling thread makes them all.
    """

    def __init__(self, codec: Firefly, device: torch.device, workers: int) -> None:
        self._codec, self._device = codec, device
        self.workers = workers
        self.max_frames: int | None = None  # in the codec at a time, for little memory; None: as is quickest
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._making: dict[Future[list[np.ndarray]], list[_Passage]] = {}
        self._failed: dict[Sentence, BaseException] = {}

    @property
    def busy(self) -> bool:
        """Whether workers are making something."""
        return bool(self._making)

    def make(self, due: Sequence[tuple[Sentence, int]], *, alone: bool) -> None:
        """Have the frames of sentences made into sound, each from where it has got to up to the frame given.

        alone: nothing else computes now, so that a single passage is made best here and now, on all threads.
        """
        passages = [self._cut(sentence, end) for sentence, end in due]
        if not passages:
            return
        apart = [[passage] for passage in passages] if self._device.type == "cpu" else [passages]
        for group in apart:
            if self.workers and not (alone and len(passages) == 1 and not self.busy):
                self._making[self._workers().submit(self._decode_beside, group)] = group
                continue
            try:
                self._keep(group, self._decode(group))
            except Exception as error:
                self._fail(group, error)

    def collect(self, wait_s: float = 0.0) -> bool:
        """Hand to the sentences what the workers have made; whether there was anything.

        wait_s: seconds to wait for it, if nothing is ready yet.
        """
        if not self._making:
            return False
        ready, _ = wait(self._making, timeout=wait_s, return_when=FIRST_COMPLETED)
        for future in ready:
            passages = self._making.pop(future)
            if error := future.exception():
                self._fail(passages, error)
            else:
                self._keep(passages, future.result())
        return bool(ready)

    def take_failures(self) -> dict[Sentence, BaseException]:
        """The sentences whose sound could not be made since the last call, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def _cut(self, sentence: Sentence, end: int) -> _Passage:
        begin = max(0, sentence.emitted - self._codec.context_frames)
        if sentence.codes is not None:
            codes = torch.from_numpy(sentence.codes[:, begin:end])
        else:
            codes = sentence.sequence.codes(begin)[:, : end - begin]
        sentence.sounding = end
        return _Passage(sentence, end, codes, sentence.emitted - begin)

    @torch.inference_mode()
    def _decode(self, passages: Sequence[_Passage]) -> list[np.ndarray]:
        codes = [passage.codes.to(self._device) for passage in passages]
        starts = [passage.start for passage in passages]
        return [sound.cpu().numpy() for sound in decode_windows(self._codec, codes, starts, self.max_frames)]

    def _decode_beside(self, passages: Sequence[_Passage]) -> list[np.ndarray]:
        with torch.cuda.stream(self._stream):  # of no effect where there is none
            return self._decode(passages)

    def _fail(self, passages: Sequence[_Passage], error: BaseException) -> None:
        self._failed.update((passage.sentence, error) for passage in passages)

    def _keep(self, passages: Sequence[_Passage], pieces: Sequence[np.ndarray]) -> None:
        rate = self._codec.config.sample_rate
        for passage, piece in zip(passages, pieces, strict=True):
            sentence = passage.sentence
            if sentence.emitted == 0 and not sentence.first:
                piece = fade_in(piece, rate)
            sentence.emitted = passage.end
            if sentence.sounded and not sentence.last:
                piece = np.concatenate([fade_out(piece, rate), silence(sentence.pause_s, rate)])
            sentence.audio.append(piece)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_size != self.workers:
            if self._pool is not None:
                self._pool.shutdown(wait=False)  # what it has been given is still made
            self._pool, self._pool_size = start_workers(self.workers), self.workers
        return self._pool


def start_workers(count: int) -> ThreadPoolExecutor:
    """Threads whose PyTorch computes on one core each, while the calling thread keeps all of its own."""
    threads = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # has the thread take the process's number now, or it would do so after the next line
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, "shoal-codec")
    for _ in range(count):
        pool.submit(begin)
    ready.wait()
    # The number is the calling thread's own, but for what MKL and threads yet to come take from the last call.
    torch.set_num_threads(threads)
    return pool
