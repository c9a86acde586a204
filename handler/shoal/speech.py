"""`FishSpeech`: the model as people use it. Text in, speech out; one at a time, many together, or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shoal.audio_cache import AudioCache
from shoal.cache import AudioFeatureCache
from shoal.engine import Engine, KVPrefix
from shoal.errors import RequestError
from shoal.features import Features
from shoal.model.linear import PACKED_FOR_MANY
from shoal.prompt import VoicePrompt, voice_prefix
from shoal.sampling import SamplingParams
from shoal.scheduler import Scheduler, SpeechRequest, Utterance
from shoal.sizes import parse_bytes
from shoal.threads import share_cores
from shoal.voices import Voice, VoiceStore
from shoal.weights import Weights, load_weights, release_weights, share_weights

log = logging.getLogger(__name__)

VoiceLike = str | Voice | VoicePrompt | None


@dataclass(frozen=True, eq=False)
class Speech:
    """One spoken text."""

    audio: np.ndarray  # (samples,) float32, -1 to 1
    sample_rate: int
    features: Features
    seed: int
    cache_hit: bool
    batch_size: int  # the largest batch it decoded in; 0 for a cache hit

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    def save(self, path: str | Path) -> None:
        """Write a sound file; the suffix names the format (.wav, .flac, .mp3, ...)."""
        import soundfile

        soundfile.write(path, self.audio, self.sample_rate)


@dataclass
class SpeechConfig:
    """Switches that can be turned while the model runs."""

    enable_intermediate_feature_caching: bool = True  # False: every request decodes; nothing is looked up or kept


class FishSpeech:
    """Fish Speech 1.5 with its engine, codec, voices and cache. Make one with `FishSpeech.load`."""

    def __init__(
        self,
        weights: Weights,
        *,
        max_batch_size: int = 8,
        max_waiting: int = 1024,
        threads: int | None = None,
        codec_workers: int | None = None,
        cuda_graphs: bool = True,
        cache: AudioFeatureCache | None = None,
    ) -> None:
        self._weights = weights
        self.model, self.codec, self.tokenizer = weights.model, weights.codec, weights.tokenizer
        self.fingerprint = weights.fingerprint
        self.max_batch_size = max_batch_size
        self.config = SpeechConfig()
        self.cache = AudioFeatureCache() if cache is None else cache
        self.audio_cache: AudioCache | None = None
        self.voices = VoiceStore(self.codec, self.compute_prefix, fingerprint=self.fingerprint, tiers=self.cache.tiers)
        self._engine = self._new_engine(max_batch_size, "auto" if cuda_graphs else "off")
        workers = share_cores(self.model, threads, codec_workers)
        self._scheduler = Scheduler(self, self._engine, max_waiting=max_waiting, codec_workers=workers)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_batch_size: int = 8,
        max_waiting: int = 1024,
        threads: int | None = None,
        codec_workers: int | None = None,
        cuda_graphs: bool = True,
        cache: AudioFeatureCache | None = None,
        weights_cache: bool = False,
        pack_weights: bool = True,
        codec_dtype: str | torch.dtype = "float32",
    ) -> FishSpeech:
        """Load a checkpoint directory in Fish Speech 1.5's format.

        Args:
            device: "cpu", "cuda", "cuda:1", ...; "auto" takes the GPU if there is one.
            dtype: "float32", "bfloat16", ...; "auto" is bfloat16 on a GPU and float32 on the CPU. "int8" keeps the
                layers' weights in one byte each: a quarter of float32's memory, slightly different codes.
            max_batch_size: rows that can decode at a time. For 1 a CPU gets the weights in another layout, with which a
                single row is a third faster where the model is large.
            threads: CPU cores to use in this process, shared out by `shoal.threads`; None: as many as PyTorch would.
            codec_workers: sentences whose sound is made beside the decoding; 0: none, sound is made between two steps.
                None: as `shoal.threads` finds best.
            cuda_graphs: run steps as graphs, one per size of batch, where there is a GPU; False: kernel by kernel.
            cache: where features (and, in its slower tiers, voices) are kept.
            weights_cache: share the weights with what else loads them in this process (`enable_model_weights_cache`).
            pack_weights: put the layers into the layout that a CPU multiplies fastest; False: leave them plain.
            codec_dtype: in which sound is made. "bfloat16" may be quicker on a GPU; its noise is 44 dB below the sound.

        Raises:
            CheckpointError: the directory cannot be used; the message says why and what to do.
            RequestError: device or dtype is not one that this machine has.
        """
        pack = 1 if max_batch_size == 1 else PACKED_FOR_MANY
        pack = pack if pack_weights else 0
        weights = load_weights(path, device, dtype, share=weights_cache, pack=pack, codec_dtype=codec_dtype)
        speech = cls(
            weights,
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            threads=threads,
            codec_workers=codec_workers,
            cuda_graphs=cuda_graphs,
            cache=cache,
        )
        voices = Path(path) / "voices"
        if voices.is_dir():
            speech.voices.load_folder(voices)
        return speech

    @property
    def sample_rate(self) -> int:
        """Samples per second of all audio that goes in and comes out."""
        return self.codec.config.sample_rate

    @property
    def num_codebooks(self) -> int:
        return self.model.config.num_codebooks

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def scheduler(self) -> Scheduler:
        """What all calls below go through; a server submits to it and steps it itself."""
        return self._scheduler

    def synthesize(
        self,
        text: str,
        voice: VoiceLike = None,
        params: SamplingParams = SamplingParams(),
        *,
        use_cache: bool = True,
    ) -> Speech:
        """Speak one text. Raises what `generate_batch` raises."""
        return self.generate_batch([text], voice, params, use_cache=use_cache)[0]

    def generate_batch(
        self,
        texts: Sequence[str],
        voice: VoiceLike | Sequence[VoiceLike] = None,
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        use_cache: bool = True,
    ) -> list[Speech]:
        """Speak many texts together, as many at a time as the engine has rows; the results keep their order.

        Args:
            voice, params: one for all texts, or one each.

        Raises:
            RequestError: a text, voice or parameter is wrong; nothing is spoken then.
            ShoalError: decoding failed.
        """
        voices = one_each(voice, len(texts), "voice")
        kinds = one_each(params, len(texts), "params")
        requests = [
            SpeechRequest(text, v, p, use_cache=use_cache) for text, v, p in zip(texts, voices, kinds, strict=True)
        ]
        return self._finish(self._submit_all(requests))

    def extract_features(
        self, text: str, voice: VoiceLike = None, params: SamplingParams = SamplingParams()
    ) -> Features:
        """The VQ codes of a text as it would be spoken, from the cache where it is known; no sound is made."""
        request = SpeechRequest(text, voice, params, audio=False)
        return self._finish(self._submit_all([request]))[0].features

    def synthesize_from_features(self, features: Features) -> Speech:
        """The audio of known features, without the language model; the same as when they were made."""
        return self.generate_batch_with_features([features])[0]

    def generate_batch_with_features(self, features: Sequence[Features]) -> list[Speech]:
        """The audio of many known features, decoded together.

        Raises:
            RequestError: features come from another checkpoint.
        """
        for item in features:
            if item.fingerprint != self.fingerprint:
                raise RequestError(
                    f"these features come from checkpoint {item.fingerprint}, this one is {self.fingerprint}: "
                    "codes mean nothing to another codec"
                )
        return self._finish([self._scheduler.submit_features(item) for item in features])

    def stream(
        self, text: str, voice: VoiceLike = None, params: SamplingParams = SamplingParams(), *, use_cache: bool = True
    ) -> Iterator[np.ndarray]:
        """Speak one text piece by piece: float32 samples as they become ready; joined they are `synthesize`'s audio.

        Closing the iterator early frees the request's row. Raises what `generate_batch` raises.
        """
        utterance = self._scheduler.submit(SpeechRequest(text, voice, params, use_cache=use_cache, stream=True))
        try:
            while not utterance.done:
                self._scheduler.step()
                if len(piece := utterance.take_audio()):
                    yield piece
            if utterance.error:
                raise utterance.error
            if len(piece := utterance.take_audio()):  # another thread's step may have ended it
                yield piece
        finally:
            self._scheduler.cancel(utterance)

    @property
    def caching(self) -> bool:
        """Whether finished utterances are looked up and kept."""
        return self.config.enable_intermediate_feature_caching and self.cache.enabled

    @property
    def precision(self) -> str:
        """ "float32", "bfloat16", "float16" or "int8": the arithmetic of the language model."""
        return self._weights.precision

    def enable_audio_cache(self, max_bytes: int | str = "256MB") -> None:
        """Keep finished sound too, up to so much, so that what was said before costs nothing; 0 turns it off."""
        self.audio_cache = AudioCache(max_bytes) if parse_bytes(max_bytes) else None

    def enable_model_weights_cache(self, enabled: bool = True) -> None:
        """Share these weights with what loads the same checkpoint in this process, also after this object is gone.

        False ends that; the memory is free once nobody uses the weights.
        """
        (share_weights if enabled else release_weights)(self._weights)

    def set_internal_cache_capacity(self, capacity: int | str) -> None:
        """Bound all caches together, as bytes or "5GB"; what no longer fits leaves at once.

        Half goes to prefilled voices, which lie where the model runs, a 64th to encoded voices, and the rest to
        features and, where it is enabled, sound.
        """
        total = parse_bytes(capacity)
        self.voices.set_capacity(codes=total // 64, prefixes=total // 2)
        rest = total - total // 2 - total // 64
        audio = rest // 2 if self.audio_cache is not None else 0
        if self.audio_cache is not None:
            self.audio_cache.set_capacity(audio)
        self.cache.set_capacity(rest - audio)

    def release_memory(self) -> bool:
        """Give back what past batches took; weights and caches stay. False, and no effect, while requests run.

        The next request takes memory anew.
        """
        released = self._scheduler.release_memory()
        if released and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return released

    @property
    def cached_bytes(self) -> int:
        """What all caches together hold in memory now."""
        audio = self.audio_cache.nbytes if self.audio_cache is not None else 0
        return self.cache.stats().bytes + audio + self.voices.nbytes

    def recall_audio(self, features: Features) -> np.ndarray | None:
        """The sound of known features, (samples,) float32, if it was kept."""
        if self.audio_cache is None:
            return None
        kept = self.audio_cache.retrieve(self.audio_cache.generate_key(features))
        return None if kept is None else np.frombuffer(kept, dtype=np.float32)

    def keep_audio(self, features: Features, audio: np.ndarray) -> None:
        """Keep sound for `recall_audio`, where that is enabled."""
        if self.audio_cache is not None:
            key = self.audio_cache.generate_key(features)
            if key not in self.audio_cache:
                self.audio_cache.store(key, audio.tobytes())

    @torch.inference_mode()
    def compute_prefix(self, voice: VoicePrompt) -> KVPrefix:
        """The KV prefix of a voice's prompt."""
        return self._engine.compute_prefix(voice_prefix(self.tokenizer, self.num_codebooks, voice))

    def _new_engine(self, max_batch_size: int, graphs: Literal["auto", "off"]) -> Engine:
        return Engine(
            self.model,
            im_end_id=self.tokenizer.im_end_id,
            semantic_begin_id=self.tokenizer.semantic_begin_id,
            max_batch_size=max_batch_size,
            check_every=1 if self.device.type == "cpu" else 4,
            graphs=graphs,
        )

    def _submit_all(self, requests: Sequence[SpeechRequest]) -> list[Utterance]:
        utterances: list[Utterance] = []
        try:
            for request in requests:
                utterances.append(self._scheduler.submit(request))
        except Exception:
            for utterance in utterances:
                self._scheduler.cancel(utterance)
            raise
        return utterances

    def _finish(self, utterances: Sequence[Utterance]) -> list[Speech]:
        try:
            self._scheduler.run(utterances)
        except BaseException:  # Ctrl-C too: nothing of this call may go on decoding in a later one
            for utterance in utterances:
                self._scheduler.cancel(utterance)
            raise
        for utterance in utterances:
            if utterance.error:
                raise utterance.error
        return [utterance.result for utterance in utterances if utterance.result]


def one_each(value: Any, count: int, name: str) -> list:
    """A list of `count` values: the given ones, or one given value repeated. Raises RequestError for another number."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise RequestError(f"{len(value)} of {name} for {count} texts: give one for all, or one each")
        return list(value)
    return [value] * count
