"""Utterances over one engine: texts are split, sentences decode side by side, audio is made as codes become ready.

Knows requests, voices, cache and codec; whoever wants speech (a call, a stream, a server's slice) drives `step`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.backoff import MemoryBackoff
from shoal.engine import Engine, KVPrefix, Sequence
from shoal.errors import CancelledError, CapacityError, OutOfMemoryError, ShoalError, is_out_of_memory
from shoal.features import Features
from shoal.joining import pause_after
from shoal.memory import give_memory_back
from shoal.prompt import VoicePrompt, text_prompt
from shoal.sampling import MAX_SEED
from shoal.sounding import SoundMaker
from shoal.text import prepare_text, split_sentences, split_text
from shoal.utterance import Sentence, SpeechRequest, Utterance, collect_audio, make_sentences

if TYPE_CHECKING:
    from shoal.speech import FishSpeech

log = logging.getLogger(__name__)

_LARGEST_CHUNK = 64  # frames per streamed piece: few at first, doubling up to here
_CODEC_WAIT_S = 0.005  # that a step waits for the codec when it is all there is to wait for
_SEED_STEP = 0x9E3779B97F4A7C15  # each sentence of a text draws from a stream of its own


class Scheduler:
    """Drives an engine and a codec for many utterances. Thread-safe; any thread may step.

    Args:
        max_waiting: utterances that may be in it at a time; `submit` refuses more.
        max_chars: longest text.
        codec_workers: sentences whose sound is made beside the decoding; 0: none, each step makes its own.
    """

    def __init__(
        self,
        speech: FishSpeech,
        engine: Engine,
        *,
        max_waiting: int = 1024,
        max_chars: int = 20_000,
        codec_workers: int = 0,
    ) -> None:
        self._speech, self._engine = speech, engine
        self.max_waiting, self.max_chars = max_waiting, max_chars
        self.sound = SoundMaker(speech.codec, speech.device, codec_workers)
        self._active: list[Utterance] = []  # in the order of submission, not yet done
        self._by_sequence: dict[Sequence, tuple[Utterance, Sentence]] = {}
        self._leaders: dict[str, Utterance] = {}  # by cache key: those that decode while equal ones may wait for them
        self._backoff = MemoryBackoff(engine.batch_limit)
        self.out_of_memory = 0  # times that it happened
        self._turn = 0
        self._decoding_s, self._decoded_frames = 0.0, 0
        self._lock = threading.RLock()

    @property
    def batch_limit(self) -> int:
        """Rows that may decode at a time; can be changed while it runs, up to the engine's maximum.

        When memory has run out it is lower than what was set, for a while.
        """
        return self._engine.batch_limit

    @batch_limit.setter
    def batch_limit(self, rows: int) -> None:
        self._backoff = MemoryBackoff(max(1, min(rows, self._engine.max_batch_size)))
        self._engine.batch_limit = self._backoff.limit()

    @property
    def live(self) -> int:
        """Rows decoding now."""
        return self._engine.live

    @property
    def waiting(self) -> int:
        """Sentences that have no row yet."""
        return self._engine.waiting + sum(len(u._pending) for u in self._active)

    @property
    def frames(self) -> int:
        """Decoded so far, of all rows."""
        return self._decoded_frames

    @property
    def idle(self) -> bool:
        return not self._active

    def submit(self, request: SpeechRequest) -> Utterance:
        """Take one request in; its audio comes from later steps.

        Raises:
            RequestError: the text cannot be spoken, or the voice is unknown.
            TooLargeError: the text is too long.
            CapacityError: too many utterances are waiting.
        """
        if len(self._active) >= self.max_waiting:
            raise CapacityError(f"{len(self._active)} requests are waiting, which is the limit; try again later")
        text = prepare_text(request.text, self.max_chars)
        voice = self._speech.voices.resolve(request.voice)
        made_by = f"{self._speech.fingerprint} {self._speech.precision}"  # another arithmetic may give other codes
        key = self._speech.cache.generate_cache_key(
            text, voice.id if voice else None, request.params, made_by, request.chunk_length
        )
        utterance = Utterance(request, text, request.params.resolve_seed(), key, voice)
        cached = request.use_cache and self._speech.caching
        if cached and key not in self._leaders and (found := self._ours(self._speech.cache.retrieve_features(key))):
            self._recall(utterance, found)
        with self._lock:
            if not utterance.cache_hit:
                if cached and key in self._leaders:
                    self._leaders[key]._followers.append(utterance)
                elif cached and (found := self._ours(self._speech.cache.in_memory(key))):  # a leader ended in between
                    self._recall(utterance, found)
                else:
                    self._start(utterance)
            self._active.append(utterance)
        return utterance

    def submit_features(self, features: Features, *, stream: bool = False) -> Utterance:
        """Take in an utterance whose codes are known; only its audio is made."""
        utterance = Utterance(SpeechRequest(features.text, stream=stream), features.text, 0, "", None)
        self._recall(utterance, features)
        with self._lock:
            self._active.append(utterance)
        return utterance

    def cancel(self, utterance: Utterance, error: ShoalError | None = None) -> None:
        """Stop an utterance and free its rows at once; it ends with `error` (CancelledError by default)."""
        with self._lock:
            if utterance.done:
                return
            self._hand_over(utterance)
            self._fail(utterance, error or CancelledError("the request was cancelled"))

    def step(self) -> list[Utterance]:
        """Decode one frame for all rows, have the audio made that is due; returns the utterances that ended with it."""
        with self._lock:
            ended: list[Utterance] = []
            self._engine.batch_limit = self._backoff.limit()
            try:
                self._feed(ended)
                for sequence in self._decode():
                    self._sentence_decoded(sequence, ended)
                self._sound(ended)
            except Exception as error:
                if is_out_of_memory(error):
                    ended += self._retry_with_fewer(error)
                else:
                    ended += self._abort(ShoalError(f"decoding failed: {type(error).__name__}: {error}"))
            for utterance in [u for u in self._active if u._sentences and all(s.sounded for s in u._sentences)]:
                ended += self._complete(utterance)
            return ended

    def run(self, utterances: Iterable[Utterance]) -> None:
        """Step until all of these are done. Several threads may do so at once; they share the steps."""
        for utterance in utterances:
            while not utterance.done:
                self.step()

    def release_memory(self) -> bool:
        """Give back what the rows of past requests took; False, and no effect, while requests are under way."""
        with self._lock:
            if self._active:
                return False
            self._engine.abort()
        return True

    def _start(self, utterance: Utterance) -> None:
        """Have an utterance decoded; equal ones that come while it lasts follow it."""
        split = split_sentences if self._speech.model.config.one_sentence_prompts else split_text
        pieces = split(utterance.text, utterance.request.chunk_length)
        pauses = [*map(pause_after, pieces[:-1]), 0.0]
        utterance._sentences = make_sentences(pieces, pauses)
        utterance._pending.extend(utterance._sentences if utterance.voice else utterance._sentences[:1])
        if utterance.request.use_cache and self._speech.caching:
            self._leaders[utterance.key] = utterance

    def _ours(self, found: Features | None) -> Features | None:
        """What the cache has, unless it is of another model: a slow tier may hold what anyone wrote there."""
        ours = (self._speech.fingerprint, self._speech.num_codebooks)
        return found if found and (found.fingerprint, len(found.codes)) == ours else None

    def _recall(self, utterance: Utterance, features: Features, audio: np.ndarray | None = None) -> None:
        """Give an utterance its codes and, where it is known, its audio."""
        utterance.cache_hit, utterance.seed, utterance.recalled = True, features.seed, features
        utterance._sentences = make_sentences([""] * len(features.pauses_s), features.pauses_s)
        wanted = utterance.request.audio
        if audio is None and wanted and utterance.request.use_cache:
            audio = self._speech.recall_audio(features)
        for sentence, codes in zip(utterance._sentences, features.sentences(), strict=True):
            sentence.codes = codes
            if audio is not None or not wanted:
                sentence.emitted = codes.shape[1]
        if audio is not None and wanted:
            utterance._pieces.append(audio.copy())

    def _decode(self) -> list[Sequence]:
        """One step of the engine; returns the sequences that ended with it."""
        begin = time.perf_counter()
        ended = self._engine.step()
        self._decoding_s += time.perf_counter() - begin
        self._decoded_frames += self._engine.live + len(ended)
        return ended

    def _feed(self, ended: list[Utterance]) -> None:
        """Hand waiting sentences to the engine as rows become free, one utterance after the other in turn."""
        room = self._engine.batch_limit - self._engine.live - self._engine.waiting
        while room > 0:
            hungry = [u for u in self._active if u._pending]
            if not hungry:
                return
            self._turn += 1
            utterance = hungry[self._turn % len(hungry)]
            sentence = utterance._pending.popleft()
            try:
                sentence.sequence = self._engine.submit(
                    text_prompt(self._speech.tokenizer, self._speech.num_codebooks, sentence.text),
                    utterance.request.params,
                    prefix=self._prefix(utterance),
                    seed=(utterance.seed + utterance._sentences.index(sentence) * _SEED_STEP) & MAX_SEED,
                )
            except Exception as error:
                if is_out_of_memory(error) and not sentence.retried:
                    sentence.retried = True
                    utterance._pending.appendleft(sentence)
                    raise
                if is_out_of_memory(error):
                    error = OutOfMemoryError(f"out of memory, twice: {error}")
                if not isinstance(error, ShoalError):
                    raise
                self._fail(utterance, error)  # this text and voice do not fit the model: nobody else's concern
                ended.append(utterance)
                continue
            self._by_sequence[sentence.sequence] = (utterance, sentence)
            room -= 1

    def _prefix(self, utterance: Utterance) -> KVPrefix | None:
        return self._speech.voices.prefix(utterance.voice) if utterance.voice else utterance._shared_prefix

    def _sentence_decoded(self, sequence: Sequence, ended: list[Utterance]) -> None:
        utterance, sentence = self._by_sequence.pop(sequence)
        sentence.codes = sequence.codes().numpy()
        if not utterance.request.audio:
            sentence.emitted = sentence.codes.shape[1]
        first, *others = utterance._sentences
        if sentence is first and others and not utterance.voice:
            # With no voice given the first sentence becomes the others' voice, so that the timbre stays the same.
            prompt = VoicePrompt((sentence.text,), (torch.from_numpy(sentence.codes),))
            try:
                utterance._shared_prefix = self._speech.compute_prefix(prompt)
            except Exception as error:
                kind = OutOfMemoryError if is_out_of_memory(error) else ShoalError
                self._fail(utterance, error if isinstance(error, ShoalError) else kind(f"the next sentences: {error}"))
                ended.append(utterance)
                return
            utterance._pending.extend(others)

    def _due(self) -> list[tuple[Sentence, int]]:
        """Sentences that should sound further now, and up to which frame."""
        due = []
        for utterance in self._active:
            for sentence in utterance._sentences:
                if sentence.sounded:
                    continue
                if sentence.sounding > sentence.emitted:  # the codec has it
                    if utterance.request.stream:
                        break
                    continue
                if sentence.codes is not None:
                    due.append((sentence, sentence.codes.shape[1]))
                elif utterance.request.stream and sentence.sequence:
                    # The last frame so far waits: only when its sentence has ended is it known whether to fade it.
                    ready = sentence.sequence.frames - 1
                    if ready - sentence.emitted >= utterance._next_chunk:
                        utterance._next_chunk = min(2 * utterance._next_chunk, _LARGEST_CHUNK)
                        due.append((sentence, ready))
                if utterance.request.stream:
                    break  # a stream is made in its order
        return due

    def _sound(self, ended: list[Utterance]) -> None:
        """Hand the codec what is due, and the utterances what it has made."""
        decoding = self._engine.live + self._engine.waiting > 0
        self.sound.make(self._due(), alone=not decoding)
        self.sound.collect(0.0 if decoding else _CODEC_WAIT_S)
        failures = self.sound.take_failures()
        for utterance in list(self._active):
            error = next((failures[s] for s in utterance._sentences if s in failures), None)
            if error is None:
                collect_audio(utterance)
            else:
                log.error("the codec failed for one request", exc_info=error)
                kind = OutOfMemoryError if is_out_of_memory(error) else ShoalError
                self._fail(utterance, kind(f"making the sound failed: {type(error).__name__}: {error}"))
                ended.append(utterance)

    def _complete(self, utterance: Utterance) -> list[Utterance]:
        """End an utterance that is all there, and its followers with it; returns those that ended."""
        from shoal.speech import Speech

        sentences, request = utterance._sentences, utterance.request
        features = utterance.recalled or Features(
            codes=np.concatenate([s.codes for s in sentences], axis=1),
            sentence_frames=tuple(s.codes.shape[1] for s in sentences),
            pauses_s=tuple(s.pause_s for s in sentences),
            text=utterance.text,
            seed=utterance.seed,
            fingerprint=self._speech.fingerprint,
            cost_s=sum(s.codes.shape[1] for s in sentences) * self._decoding_s / max(1, self._decoded_frames),
        )
        audio = np.concatenate(utterance._pieces) if utterance._pieces else np.zeros(0, dtype=np.float32)
        if request.use_cache and self._speech.caching:
            if not utterance.cache_hit:
                self._speech.cache.store_features(utterance.key, features)
            if request.audio:
                self._speech.keep_audio(features, audio)
        utterance.result = Speech(
            audio=audio,
            sample_rate=self._speech.sample_rate,
            features=features,
            seed=utterance.seed,
            cache_hit=utterance.cache_hit,
            batch_size=utterance.batch_size,
        )
        self._active.remove(utterance)
        ended = [utterance]
        for follower in self._dissolve(utterance):
            self._speech.cache.count_hit(features)
            self._recall(follower, features, audio if request.audio else None)
            if all(s.sounded for s in follower._sentences):  # else the leader made no audio, and later steps do
                ended += self._complete(follower)
        return ended

    def _fail(self, utterance: Utterance, error: ShoalError) -> None:
        followers = self._dissolve(utterance)
        for sentence in utterance._sentences:
            if sentence.sequence and self._by_sequence.pop(sentence.sequence, None):
                self._engine.cancel(sentence.sequence)
        utterance._pending.clear()
        utterance.error = error
        self._active.remove(utterance)
        if followers:  # start anew with the next one
            followers[0]._followers = followers[1:]
            self._start(followers[0])

    def _dissolve(self, leader: Utterance) -> list[Utterance]:
        """Release those who wait for this utterance; returns the ones that still wait, with no sentences as yet."""
        if self._leaders.get(leader.key) is leader:
            del self._leaders[leader.key]
        followers, leader._followers = [f for f in leader._followers if not f.done], []
        return followers

    def _hand_over(self, leader: Utterance) -> None:
        """Whoever decodes for others leaves: the next in line goes on with all that has been decoded so far."""
        followers = self._dissolve(leader)
        if not followers:
            return
        heir = followers[0]
        heir._followers = followers[1:]
        if heir.request.audio != leader.request.audio:
            self._start(heir)
            return
        for name in ("seed", "_sentences", "_pending", "_shared_prefix", "_next_chunk", "_collected", "_pieces"):
            setattr(heir, name, getattr(leader, name))
        leader._sentences, leader._pending = [], deque()
        for sentence in heir._sentences:
            if sentence.sequence in self._by_sequence:
                self._by_sequence[sentence.sequence] = (heir, sentence)
        self._leaders[heir.key] = heir

    def _retry_with_fewer(self, error: BaseException) -> list[Utterance]:
        """Memory ran out: give back what the batch took, and decode its sentences once more, half as many at a time.

        A seed decides what a sentence becomes, so that a stream goes on where it was. Returns the utterances that end:
        those for which this is the second time.
        """
        live, ended = self._engine.live, []
        self.out_of_memory += 1
        self._engine.abort()
        self._engine.batch_limit = self._backoff.ran_out(live)
        give_memory_back(self._speech.device)
        log.warning("out of memory with %d rows: at most %d from now on (%s)", live, self._engine.batch_limit, error)
        retries, self._by_sequence = list(self._by_sequence.values()), {}
        for utterance, sentence in reversed(retries):
            sentence.sequence = None
            if not sentence.retried:
                sentence.retried = True
                utterance._pending.appendleft(sentence)
            elif not utterance.done:
                self._fail(utterance, OutOfMemoryError(f"out of memory, twice: {error}; lower the batch limit"))
                ended.append(utterance)
        return ended

    def _abort(self, error: ShoalError) -> list[Utterance]:
        """After an error that left the engine in an unknown state: everything in it fails, the next request works.

        Followers have nothing in the engine: one of each kind starts anew.
        """
        log.exception("decoding failed, %d requests are lost", len(self._active))
        self._engine.abort()
        self._by_sequence.clear()
        lost = [u for u in self._active if u._sentences]
        for utterance in lost:
            self._fail(utterance, error)
        return lost
