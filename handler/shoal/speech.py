"""`FishSpeech`: the model as people use it. Text in, speech out; one at a time, many together, or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.cache import AudioFeatureCache
from shoal.checkpoint import Checkpoint, check_state, convert, open_checkpoint
from shoal.engine import Engine, KVPrefix
from shoal.errors import RequestError
from shoal.features import Features
from shoal.model.dual_ar import DualAR, load_dual_ar
from shoal.model.firefly import Firefly, fold_weight_norm
from shoal.prompt import VoicePrompt, voice_prefix
from shoal.sampling import SamplingParams
from shoal.scheduler import Scheduler, SpeechRequest, Utterance
from shoal.tokenizer import Tokenizer
from shoal.voices import Voice, VoiceStore

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


class FishSpeech:
    """Fish Speech 1.5 with its engine, codec, voices and cache. Make one with `FishSpeech.load`."""

    def __init__(
        self,
        model: DualAR,
        codec: Firefly,
        tokenizer: Tokenizer,
        fingerprint: str,
        *,
        max_batch_size: int = 8,
        max_waiting: int = 1024,
        cache: AudioFeatureCache | None = None,
    ) -> None:
        self.model, self.codec, self.tokenizer, self.fingerprint = model, codec, tokenizer, fingerprint
        self.max_batch_size = max_batch_size
        self.cache = AudioFeatureCache() if cache is None else cache
        self.voices = VoiceStore(codec, self.compute_prefix)
        self._engine = self._new_engine(max_batch_size)
        self._scheduler = Scheduler(self, self._engine, max_waiting=max_waiting)

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
        cache: AudioFeatureCache | None = None,
    ) -> FishSpeech:
        """Load a checkpoint directory in Fish Speech 1.5's format.

        Args:
            device: "cpu", "cuda", "cuda:1", ...; "auto" takes the GPU if there is one.
            dtype: "float32", "bfloat16", ...; "auto" is bfloat16 on a GPU and float32 on the CPU. "int8" keeps the
                layers' weights in one byte each: a quarter of float32's memory, slightly different codes.
            max_batch_size: rows that can decode at a time.
            threads: CPU threads for the whole process; None leaves PyTorch's choice.

        Raises:
            CheckpointError: the directory cannot be used; the message says why and what to do.
            RequestError: device or dtype is not one that this machine has.
        """
        if threads:
            torch.set_num_threads(threads)
        int8 = dtype in ("int8", torch.int8)
        where, kind = _pick_device(device), _pick_dtype("auto" if int8 else dtype, device)
        checkpoint = open_checkpoint(path)
        tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
        last = min(tokenizer.semantic_end_id, tokenizer.semantic_begin_id + checkpoint.config.codebook_size - 1)
        head_ids = [tokenizer.im_end_id, *range(tokenizer.semantic_begin_id, last + 1)]
        model = load_dual_ar(checkpoint, head_ids, where, kind, int8=int8)
        codec = load_codec(checkpoint, where)
        speech = cls(
            model,
            codec,
            tokenizer,
            checkpoint.fingerprint,
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            cache=cache,
        )
        if (checkpoint.path / "voices").is_dir():
            speech.voices.load_folder(checkpoint.path / "voices")
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
        voices = _one_each(voice, len(texts), "voice")
        kinds = _one_each(params, len(texts), "params")
        requests = [
            SpeechRequest(text, v, p, use_cache=use_cache) for text, v, p in zip(texts, voices, kinds, strict=True)
        ]
        return self._finish(self._submit_all(requests))

    def extract_features(
        self, text: str, voice: VoiceLike = None, params: SamplingParams = SamplingParams()
    ) -> Features:
        """The VQ codes of a text as spoken. They come with its audio, from the cache where it is known."""
        return self.synthesize(text, voice, params).features

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
        finally:
            self._scheduler.cancel(utterance)

    @torch.inference_mode()
    def compute_prefix(self, voice: VoicePrompt) -> KVPrefix:
        """The KV prefix of a voice's prompt."""
        return self._engine.compute_prefix(voice_prefix(self.tokenizer, self.num_codebooks, voice))

    def _new_engine(self, max_batch_size: int) -> Engine:
        return Engine(
            self.model,
            im_end_id=self.tokenizer.im_end_id,
            semantic_begin_id=self.tokenizer.semantic_begin_id,
            max_batch_size=max_batch_size,
            check_every=1 if self.device.type == "cpu" else 4,
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


def load_codec(checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Firefly:
    """The codec with a checkpoint's weights, weight norm folded.

    Raises:
        CheckpointError: a tensor is missing, surplus or of the wrong shape.
    """
    try:
        state = fold_weight_norm(checkpoint.read_codec())
    except KeyError as error:
        check_state(checkpoint.codec_file, {str(error.args[0]): ()}, {})
        raise
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in Firefly(checkpoint.codec).state_dict().items()}
    check_state(checkpoint.codec_file, expected, state)
    state = {name: convert(tensor, dtype, device) for name, tensor in state.items()}
    return Firefly.from_state(checkpoint.codec, state).requires_grad_(False)


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"unknown device {device!r}: use auto, cpu or cuda") from None
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device {device!r} asked for, but PyTorch sees no CUDA GPU here: use cpu or auto")
    return picked


def _pick_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if _pick_device(device).type == "cpu" else torch.bfloat16
    picked = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if picked not in (torch.float32, torch.bfloat16, torch.float16):
        raise RequestError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16, float16 or int8")
    return picked


def _one_each(value, count: int, name: str) -> list:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise RequestError(f"{len(value)} of {name} for {count} texts: give one for all, or one each")
        return list(value)
    return [value] * count
