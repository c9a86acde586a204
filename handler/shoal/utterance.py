"""One text on its way to speech: what was asked for, its sentences, and the sound that is ready so far. Data only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shoal.engine import KVPrefix, Sequence
from shoal.errors import ShoalError
from shoal.features import Features
from shoal.prompt import VoicePrompt
from shoal.sampling import SamplingParams
from shoal.voices import Voice

if TYPE_CHECKING:
    from shoal.speech import Speech

FIRST_CHUNK = 8  # frames of the first streamed piece: few, for a quick start


@dataclass(frozen=True)
class SpeechRequest:
    """One text to speak."""

    text: str
    voice: str | Voice | VoicePrompt | None = None  # a registered name, or a voice itself
    params: SamplingParams = field(default_factory=SamplingParams)
    use_cache: bool = True  # look the utterance up, and keep it
    stream: bool = False  # audio is wanted piece by piece, before the end
    chunk_length: int = 200  # UTF-8 bytes per sentence that decodes on its own
    audio: bool = True  # False: the features are all that is wanted, the codec is left out


@dataclass(eq=False)
class Sentence:
    """A part of the text that decodes on its own."""

    text: str
    pause_s: float  # silence after it
    first: bool
    last: bool
    codes: np.ndarray | None = None  # (num_codebooks, frames) once finished
    sequence: Sequence | None = None
    retried: bool = False  # decoded anew after memory ran out
    sounding: int = 0  # frames that have been given to the codec
    emitted: int = 0  # frames that have become audio
    audio: list[np.ndarray] = field(default_factory=list)  # made, not yet handed to the utterance

    @property
    def sounded(self) -> bool:
        return self.codes is not None and self.emitted == self.codes.shape[1]


@dataclass(eq=False)
class Utterance:
    """One submitted request on its way; made by `Scheduler.submit`."""

    request: SpeechRequest
    text: str
    seed: int
    key: str
    voice: Voice | None
    cache_hit: bool = False
    error: ShoalError | None = None
    result: Speech | None = None
    _sentences: list[Sentence] = field(default_factory=list)
    _pending: deque[Sentence] = field(default_factory=deque)
    _shared_prefix: KVPrefix | None = None  # the first sentence, as the voice of the others
    _next_chunk: int = FIRST_CHUNK
    _collected: int = 0  # sentences whose audio is complete in _pieces
    _pieces: list[np.ndarray] = field(default_factory=list)  # audio in order
    _taken: int = 0  # pieces that take_audio has handed out
    _followers: list[Utterance] = field(default_factory=list)  # equal requests that wait for this one's codes
    recalled: Features | None = None  # what it repeats, where that was known when it came

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def decoding(self) -> bool:
        """Whether it takes, or waits for, rows of the engine: not from the cache, not what waits for an equal one."""
        return not (self.cache_hit or self.done) and any(s.codes is None for s in self._sentences)

    @property
    def batch_size(self) -> int:
        """The largest batch that any of its sentences decoded in; 0 while none has."""
        return max((s.sequence.batch_size for s in self._sentences if s.sequence), default=0)

    def take_audio(self) -> np.ndarray:
        """Samples (float32) that became ready since the last call, in order; empty if there are none."""
        new, self._taken = self._pieces[self._taken :], len(self._pieces)
        return np.concatenate(new) if new else np.zeros(0, dtype=np.float32)


def make_sentences(texts: Seq[str], pauses_s: Seq[float]) -> list[Sentence]:
    """The sentences of one text, with the silence in seconds after each."""
    last = len(texts) - 1
    return [Sentence(t, p, i == 0, i == last) for i, (t, p) in enumerate(zip(texts, pauses_s, strict=True))]


def collect_audio(utterance: Utterance) -> None:
    """Move what has become audio from the sentences to the utterance, in the order of the text."""
    for sentence in utterance._sentences[utterance._collected :]:
        utterance._pieces += sentence.audio
        sentence.audio.clear()
        if not sentence.sounded:
            return
        utterance._collected += 1
