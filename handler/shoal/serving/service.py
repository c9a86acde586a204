"""The step loop behind a server: requests in, slices of decoding, replies out. Free of TorchServe's types.

A server calls `admit` for each new request, then again and again `run_slice` and `collect`. Nothing here blocks for
longer than a slice and one decode step (and, for a request that brings its own voice, the encoding of that voice), and
nothing that one request does wrong reaches another.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.audio_cache import AudioCache
from shoal.caching import WarmUp, warm_up
from shoal.errors import CancelledError, CapacityError, RequestTimeoutError, ShoalError
from shoal.memory import memory_in_use
from shoal.sampling import SamplingParams
from shoal.scheduler import SpeechRequest, Utterance
from shoal.serving.audio import CONTENT_TYPES, StreamEncoder, decode_reference, encode_audio
from shoal.serving.control import LiveLimits
from shoal.serving.limits import HandlerSettings
from shoal.serving.metrics import Recent, RequestRecord, ServiceState
from shoal.serving.replies import Reply, error_reply, kind_of, presentable, sse_delta, sse_done, sse_error
from shoal.serving.schema import INFO_PATH, TTSRequest, is_openai_path, parse_request

if TYPE_CHECKING:
    from shoal.features import Features
    from shoal.prompt import VoicePrompt
    from shoal.speech import FishSpeech, Speech

logger = logging.getLogger(__name__)

# A slice ends early for a finished utterance, but not before this part of it: calls from the server are not free.
_MIN_SLICE = 0.2


@dataclass
class _Job:
    """One request between admission and its last reply."""

    request: TTSRequest
    utterance: Utterance
    openai: bool
    streams: bool
    admitted: float
    deadline: float
    encoder: StreamEncoder | None = None
    ready: list[np.ndarray] = field(default_factory=list)  # audio taken from the scheduler, not yet encoded
    samples: int = 0  # of audio that came out so far
    started: bool = False  # a part of the reply has left: status and headers are fixed
    first_audio: float | None = None
    first_row: float | None = None  # when its first sentence began to decode


class SpeechService:
    """Serves one model to many requests. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        model: FishSpeech,
        settings: HandlerSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.settings = settings or HandlerSettings()
        self.limits = self.settings.limits
        self._clock = clock
        self._scheduler = model.scheduler
        if self.settings.batch_limit is not None:
            self._scheduler.batch_limit = min(self.settings.batch_limit, self._scheduler.batch_limit)
        self._slice_ms = self.settings.slice_ms
        self._draining = False
        cache = model.cache
        self._cache_bounds = (cache.cache_max_bytes, cache.cache_max_entries)  # as configured, or by the memory limit
        self._audio_cache = AudioCache(self.settings.audio_cache_bytes)
        self._jobs: dict[str, _Job] = {}
        self._replies: dict[str, Reply] = {}  # final replies that wait for collect()
        self._records: list[RequestRecord] = []
        self._recent = Recent()

    @property
    def pending(self) -> bool:
        """Whether any request still waits for its last reply."""
        return bool(self._jobs or self._replies)

    def knows(self, request_id: str) -> bool:
        """Whether the request was admitted and has not had its last reply."""
        return request_id in self._jobs or request_id in self._replies

    def request_ids(self) -> list[str]:
        """The requests that were admitted and have not had their last reply."""
        return [*self._jobs, *self._replies]

    def admit(
        self,
        request_id: str,
        body: Any,
        content_type: str | None = None,
        url_path: str | None = None,
        *,
        may_stream: bool = True,
    ) -> None:
        """Check a request and queue it; what is wrong with it becomes its reply. Never raises for a request's sake.

        may_stream: False where the transport carries whole replies only; streams are then answered in one piece.
        """
        if (url_path or "").strip("/") == INFO_PATH:
            self.admit_describe(request_id)
            return
        now, openai = self._clock(), is_openai_path(url_path)
        try:
            if self._draining:
                raise CapacityError("the server is going down and takes no new requests", self.limits.retry_after_s)
            if len(self._jobs) >= self.model.max_batch_size + self.limits.max_waiting:
                raise CapacityError(
                    f"{len(self._jobs)} requests are being worked on; try again later", self.limits.retry_after_s
                )
            request = parse_request(body, content_type, url_path, self.limits, self.model.voices.names())
            streams = may_stream and (request.streaming or request.stream_format == "sse")
            utterance = self._scheduler.submit(self._speech_request(request, streams))
        except Exception as exc:
            self._reject(request_id, exc, now, openai)
            return
        job = _Job(request, utterance, openai, streams, now, now + self.limits.max_seconds)
        if not self._answer_at_once(request_id, job):
            self._jobs[request_id] = job

    def warm(
        self,
        phrases: Sequence[str],
        voices: Sequence[str | None] = (None,),
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUp:
        """Decode phrases as requests with no parameters of their own would, in each voice; nothing else may run."""
        requests, failed = [], {}
        for voice in voices:
            for phrase in phrases:
                body = {"text": phrase} | ({"reference_id": voice} if voice else {})
                try:
                    request = parse_request(body, "application/json", None, self.limits, self.model.voices.names())
                    requests.append(self._speech_request(request, streams=False))
                except ShoalError as error:
                    failed[phrase] = error
        done = warm_up(self.model, requests, batch_size=self.model.max_batch_size, progress=progress)
        done.failed.update(failed)
        return done

    def apply(self, live: LiveLimits) -> None:
        """Have other limits from now on; what they leave out is as it was configured. What is admitted stays so."""
        settings, most = self.settings, self.model.max_batch_size
        self._scheduler.batch_limit = min(live.batch_limit or settings.batch_limit or most, most)
        waiting = settings.limits.max_waiting if live.max_waiting is None else live.max_waiting
        self.limits = settings.limits.model_copy(update={"max_waiting": waiting})
        configured, entries = self._cache_bounds
        self.model.cache.set_capacity(configured if live.cache_bytes is None else live.cache_bytes, entries)
        self._slice_ms = live.slice_ms or settings.slice_ms
        self._draining = bool(live.draining)

    def admit_describe(self, request_id: str) -> None:
        """Queue a question about the server itself; its reply is `describe()` as JSON."""
        self._replies[request_id] = Reply(200, "application/json", json.dumps(self.describe()).encode())

    def _speech_request(self, request: TTSRequest, streams: bool) -> SpeechRequest:
        voice: str | VoicePrompt | None = request.reference_id
        if request.references:
            samples, left = [], self.limits.max_reference_seconds
            for reference in request.references:
                audio = decode_reference(reference.audio, self.model.sample_rate, left, self.limits.max_reference_bytes)
                left -= len(audio) / self.model.sample_rate
                samples.append((audio, reference.text))
            voice = self.model.voices.encode(samples)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            max_new_tokens=min(request.max_new_tokens, self.limits.max_new_tokens),
        )
        return SpeechRequest(
            request.text,
            voice=voice,
            params=params,
            use_cache=request.use_memory_cache == "on",
            stream=streams,
            chunk_length=request.chunk_length,
        )

    def run_slice(self, seconds: float | None = None) -> None:
        """Decode for about `seconds` (default: the settings' slice), less when a reply is ready or there is no work."""
        seconds = self._slice_ms / 1000 if seconds is None else seconds
        begin = self._clock()
        self._expire(begin)
        while self._jobs and not self._scheduler.idle:
            try:
                finished = self._scheduler.step()
            except Exception as exc:
                self._fail_all(exc)
                return
            first = self._take_audio()
            spent = self._clock() - begin
            if spent >= seconds or ((finished or first) and spent >= seconds * _MIN_SLICE):
                return

    def _take_audio(self) -> bool:
        """Move streamed audio out of the scheduler; True when a stream has got its first."""
        first = False
        for job in self._jobs.values():
            if job.first_row is None and job.utterance.batch_size:
                job.first_row = self._clock()
            if job.streams and len(audio := job.utterance.take_audio()):
                job.ready.append(audio)
                if job.first_audio is None:
                    job.first_audio, first = self._clock(), True
        return first

    def collect(self) -> dict[str, Reply]:
        """What there is to say now, by request id. A request is forgotten with its final reply."""
        self._take_audio()
        out, self._replies = self._replies, {}
        for request_id, job in list(self._jobs.items()):
            try:
                reply = self._reply_of(request_id, job)
            except Exception as exc:
                self._scheduler.cancel(job.utterance)
                reply = self._failure(request_id, job, exc)
            if reply is None:
                continue
            job.started = True
            out[request_id] = reply
            if reply.final:
                del self._jobs[request_id]
        return out

    def cancel(self, request_id: str) -> None:
        """The client is gone: free its rows at once, and say nothing more to it."""
        self._replies.pop(request_id, None)
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._scheduler.cancel(job.utterance)
            self._record(request_id, job, "cancelled", CancelledError.status)

    def take_records(self) -> list[RequestRecord]:
        """The requests that ended since the last call."""
        records, self._records = self._records, []
        return records

    def state(self) -> ServiceState:
        """What it holds and has done, for metrics."""
        scheduler, cache, stats = self._scheduler, self.model.cache, self.model.cache.stats()
        held = {"memory": stats.bytes, "audio": self._audio_cache.nbytes, "voices": self.model.voices.nbytes}
        held |= {tier.name: tier.nbytes for tier in cache.tiers if hasattr(tier, "nbytes")}
        return ServiceState(
            live_rows=scheduler.live,
            waiting=scheduler.waiting,
            batch_limit=scheduler.batch_limit,
            frames=scheduler.frames,
            out_of_memory=scheduler.out_of_memory,
            cache_bytes=held,
            cache_hits={"memory": stats.hits - sum(stats.tier_hits.values()), **stats.tier_hits},
            cache_evictions=stats.evictions,
            memory_bytes=memory_in_use(self.model.device),
        )

    def describe(self) -> dict[str, Any]:
        """What serves here, for people and dashboards: no paths."""
        model = self.model
        return {
            "engine": "shoal",
            "checkpoint": model.fingerprint,
            "sample_rate": model.sample_rate,
            "num_codebooks": model.num_codebooks,
            "max_batch_size": model.max_batch_size,
            "batch_limit": self._scheduler.batch_limit,
            "live": self._scheduler.live,
            "waiting": self._scheduler.waiting,
            "requests": len(self._jobs),
            "draining": self._draining,
            "voices": list(model.voices.names()),
            "limits": self.limits.model_dump(),
            "precision": model.precision,
            "device": model.device.type,
            "threads": torch.get_num_threads(),
            "codec_workers": self._scheduler.sound.workers,
            "slice_ms": self._slice_ms,
            "recent": self._recent.summary(self._clock()),
            "cache": self._describe_cache(),
        }

    def _describe_cache(self) -> dict[str, Any]:
        cache, stats = self.model.cache, self.model.cache.stats()
        return {
            "max_bytes": cache.cache_max_bytes,
            "max_entries": cache.cache_max_entries,
            "audio_max_bytes": self._audio_cache.max_bytes,
            "tiers": ["memory", *(tier.name for tier in cache.tiers)],
            "tier_errors": {tier.name: tier.errors for tier in cache.tiers},
            **asdict(stats),
            "hit_rate": round(stats.hit_rate, 4),
        }

    # -- finished sound -----------------------------------------------------------------------------------------------

    def _answer_at_once(self, request_id: str, job: _Job) -> bool:
        """Reply with sound that was kept, if this request's features are known and so is their sound."""
        key = self._audio_key(job, job.utterance.recalled)
        kept = self._audio_cache.retrieve(key) if key and not job.streams else None
        if kept is None:
            return False
        self._scheduler.cancel(job.utterance)
        (job.samples,), body = struct.unpack_from("<Q", kept), kept[8:]
        headers = self._headers(job) | self._measures(job, job.samples / self.model.sample_rate)
        self._replies[request_id] = Reply(200, self._content_type(job), body, headers)
        self._record(request_id, job, "ok", 200)
        return True

    def _audio_key(self, job: _Job, features: Features | None) -> str | None:
        request = job.request
        if features is None or not self._audio_cache.max_bytes or request.use_memory_cache == "off":
            return None
        if request.stream_format == "sse":
            return None
        made = f"{request.format}/{request.loudness}"
        return self._audio_cache.generate_key(features, made, sample_rate=request.sample_rate, speed=request.speed)

    # -- replies ------------------------------------------------------------------------------------------------------

    def _reply_of(self, request_id: str, job: _Job) -> Reply | None:
        utterance = job.utterance
        if utterance.error is not None:
            return self._failure(request_id, job, utterance.error)
        if utterance.done:
            return self._last_part(request_id, job, utterance.result)
        if not job.streams:
            if self._scheduler.idle:
                raise RuntimeError("the scheduler is idle, but this request is not done")
            return None
        body = self._encode_ready(job)
        if not body and not job.started:
            return None
        return Reply(200, self._content_type(job), body, self._headers(job), final=False, stream=True)

    def _encode_ready(self, job: _Job) -> bytes:
        """Encode what a stream has got; b"" while there is nothing, or while the encoder gathers."""
        if not job.ready:
            return b""
        if job.encoder is None:
            wanted = job.request
            rate = self.model.sample_rate
            job.encoder = StreamEncoder(wanted.format, rate, wanted.sample_rate, speed=wanted.speed)
        audio = np.concatenate(job.ready)
        job.ready.clear()
        data = job.encoder.push(audio)
        job.samples = job.encoder.samples
        return sse_delta(data) if job.request.stream_format == "sse" else data

    def _last_part(self, request_id: str, job: _Job, speech: Speech) -> Reply:
        request, sse = job.request, job.request.stream_format == "sse"
        if job.started:
            body = self._encode_ready(job)
            rest = b""
            if job.encoder is not None:
                rest, job.samples = job.encoder.finish(), job.encoder.samples
            body += sse_delta(rest) if sse else rest
        else:
            encoded, job.samples = encode_audio(
                speech.audio,
                speech.sample_rate,
                request.format,
                request.sample_rate,
                speed=request.speed,
                loudness=request.loudness,
            )
            if key := self._audio_key(job, speech.features):
                self._audio_cache.store(key, struct.pack("<Q", job.samples) + encoded)
            body = sse_delta(encoded) if sse else encoded
        if sse:
            body += sse_done(len(request.text), speech.features.codes.shape[-1])
        self._record(request_id, job, "ok", 200, speech)
        return Reply(200, self._content_type(job), body, self._headers(job, speech), stream=job.started)

    def _content_type(self, job: _Job) -> str:
        return "text/event-stream" if job.request.stream_format == "sse" else CONTENT_TYPES[job.request.format]

    def _headers(self, job: _Job, speech: Speech | None = None) -> dict[str, str]:
        """What is known when a reply starts; a stream's length and times are not."""
        utterance = job.utterance
        headers = {
            "X-Shoal-Cache": "hit" if utterance.cache_hit else "miss",
            "X-Shoal-Seed": str(utterance.seed),
        }
        whole = speech is not None and not job.started
        return headers | self._measures(job, job.samples / self.model.sample_rate) if whole else headers

    def _measures(self, job: _Job, seconds: float) -> dict[str, str]:
        """What is known when a reply is whole."""
        return {
            "X-Shoal-Audio-Seconds": f"{seconds:.3f}",
            "X-Shoal-Batch-Size": str(job.utterance.batch_size),
            "X-Shoal-Time-Ms": f"{(self._clock() - job.admitted) * 1000:.1f}",
        }

    # -- failures -----------------------------------------------------------------------------------------------------

    def _reject(self, request_id: str, exc: Exception, admitted: float, openai: bool) -> None:
        error = presentable(exc, request_id)
        reply = self._replies[request_id] = error_reply(error, openai=openai)
        seconds = self._clock() - admitted
        self._records.append(RequestRecord(request_id, "rejected", reply.status, seconds, error=kind_of(error)))

    def _failure(self, request_id: str, job: _Job, exc: BaseException) -> Reply:
        """The last reply of a request that failed; once its stream has begun, only the end of the stream can tell."""
        error = presentable(exc, request_id)
        self._record(request_id, job, "failed", error.status, error=kind_of(error))
        if not job.started:
            return error_reply(error, openai=job.openai)
        logger.warning("request %s: its stream ends early: %s", request_id, error)
        body = sse_error(error) if job.request.stream_format == "sse" else b""
        return Reply(200, self._content_type(job), body, stream=True)

    def _end(self, request_id: str, job: _Job, error: ShoalError) -> None:
        """Stop a request's decoding and leave its last reply for collect()."""
        self._scheduler.cancel(job.utterance)
        self._replies[request_id] = self._failure(request_id, job, error)
        del self._jobs[request_id]

    def _expire(self, now: float) -> None:
        for request_id, job in list(self._jobs.items()):
            if now >= job.deadline and not job.utterance.done:
                seconds = self.limits.max_seconds
                self._end(
                    request_id,
                    job,
                    RequestTimeoutError(
                        f"not done after the {seconds:g} s allowed; send a shorter text or try again later"
                    ),
                )

    def _fail_all(self, exc: Exception) -> None:
        """A step raised, so no row's state can be trusted: stop and tell everyone who waits."""
        for request_id, job in list(self._jobs.items()):
            if not job.utterance.done:
                self._scheduler.cancel(job.utterance)
                self._replies[request_id] = self._failure(request_id, job, exc)
                del self._jobs[request_id]

    def _record(
        self,
        request_id: str,
        job: _Job,
        outcome: str,
        status: int,
        speech: Speech | None = None,
        error: str | None = None,
    ) -> None:
        now = self._clock()
        first = job.first_audio if job.first_audio is not None else now if speech is not None else None
        self._records.append(
            RequestRecord(
                request_id,
                outcome,
                status,
                now - job.admitted,
                None if first is None else first - job.admitted,
                None if job.first_row is None else job.first_row - job.admitted,
                job.samples / self.model.sample_rate,
                job.utterance.batch_size,
                job.utterance.cache_hit,
                job.streams,
                len(job.request.text),
                error,
                job.request.text[:200] if self.settings.log_texts else None,
            )
        )
        self._recent.add(now, self._records[-1])
