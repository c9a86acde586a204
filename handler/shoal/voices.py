"""Voices: reference audio -> VQ codes -> KV prefix, by name or by content hash. Knows nothing of requests.

Encoding a reference and prefilling its prompt both cost far more than a frame, so both are kept, bounded by bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from shoal.engine import KVPrefix
from shoal.errors import RequestError, ShoalError
from shoal.lru import ByteLRU
from shoal.model.firefly import Firefly
from shoal.packing import DamagedError, pack, unpack
from shoal.prompt import VoicePrompt
from shoal.tiers import Tier

log = logging.getLogger(__name__)

_AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
_TEXT_SUFFIXES = (".txt", ".lab")  # .lab is what upstream's reference folders use


@dataclass(frozen=True, eq=False)
class Voice:
    """A voice ready to use: its prompt and the hash of what it is made of."""

    prompt: VoicePrompt
    id: str = field(default="")

    def __post_init__(self) -> None:
        if not self.id:
            digest = hashlib.sha256()
            for text, codes in zip(self.prompt.texts, self.prompt.codes, strict=True):
                digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
                digest.update(np.ascontiguousarray(codes.to("cpu", torch.int16).numpy()).tobytes())
            object.__setattr__(self, "id", digest.hexdigest()[:32])

    def to_bytes(self) -> bytes:
        """Bytes for a file or a network; `from_bytes` gives the same voice back."""
        codes = [part.to("cpu", torch.int16).numpy() for part in self.prompt.codes]
        return pack("voice", {"texts": self.prompt.texts}, codes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Voice:
        """Raises DamagedError for bytes that are not, or no longer, a voice."""
        fields, arrays = unpack("voice", data)
        texts = fields.get("texts")
        if not isinstance(texts, list) or len(texts) != len(arrays) or any(codes.ndim != 2 for codes in arrays):
            raise DamagedError("its texts are not those of its codes")
        return cls(VoicePrompt(tuple(map(str, texts)), tuple(map(torch.from_numpy, arrays))))


class VoiceStore:
    """Registered voices, and the caches of encoded references and prefilled prompts.

    Args:
        prefill: computes the KV prefix of a voice's prompt.
        fingerprint: of the checkpoint that the codec comes from.
        tiers: slower places that keep encoded references, for the next process or for other machines.
        max_code_bytes, max_prefix_bytes: bounds of the two caches in memory.
    """

    def __init__(
        self,
        codec: Firefly,
        prefill: Callable[[VoicePrompt], KVPrefix],
        *,
        fingerprint: str = "",
        tiers: Sequence[Tier] = (),
        max_code_bytes: int = 8 * 1024**2,
        max_prefix_bytes: int = 512 * 1024**2,
    ) -> None:
        self._codec, self._prefill, self._fingerprint, self._tiers = codec, prefill, fingerprint, tuple(tiers)
        self._named: dict[str, Voice] = {}
        self._encoded: ByteLRU[Voice] = ByteLRU(max_code_bytes, _voice_bytes)
        self._prefixes: ByteLRU[KVPrefix] = ByteLRU(max_prefix_bytes, lambda prefix: prefix.nbytes)

    @property
    def sample_rate(self) -> int:
        return self._codec.config.sample_rate

    @property
    def nbytes(self) -> int:
        """What the two caches hold now."""
        return self._encoded.nbytes + self._prefixes.nbytes

    def set_capacity(self, codes: int, prefixes: int) -> None:
        """New bounds in bytes; what no longer fits leaves at once."""
        self._encoded.set_bounds(codes)
        self._prefixes.set_bounds(prefixes)

    def names(self) -> list[str]:
        return sorted(self._named)

    def register(self, name: str, references: Sequence[tuple[np.ndarray, str]]) -> Voice:
        """Give a name to (audio, text) references; audio float32 mono at `sample_rate`."""
        voice = self._named[name] = self.encode(references)
        return voice

    def load_folder(self, folder: str | Path) -> list[str]:
        """Register every voice of a folder and return their names.

        A voice is a subfolder of audio files, or an audio file, named like the voice; each audio file has its text
        beside it (.txt or .lab).

        Raises:
            ShoalError: an audio file cannot be read or has no text.
        """
        found = []
        for entry in sorted(Path(folder).iterdir()):
            if entry.is_dir():
                files = [f for f in sorted(entry.iterdir()) if f.suffix.lower() in _AUDIO_SUFFIXES]
                name = entry.name
            elif entry.suffix.lower() in _AUDIO_SUFFIXES:
                files, name = [entry], entry.stem
            else:
                continue
            if files:
                self.register(name, [_read_reference(file, self.sample_rate) for file in files])
                found.append(name)
        return found

    def encode(self, references: Sequence[tuple[np.ndarray, str]]) -> Voice:
        """References (audio float32 mono at `sample_rate`, text) as a voice; the same content is encoded once."""
        digest = hashlib.sha256()
        for audio, text in references:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0" + np.ascontiguousarray(audio).tobytes())
        key = digest.hexdigest()
        return self._encoded.get_or_make(key, lambda: self._recall(key) or self._encode_and_keep(key, references))

    def resolve(self, voice: str | Voice | VoicePrompt | None) -> Voice | None:
        """The voice that a request names or brings.

        Raises:
            RequestError: no voice has that name.
        """
        if voice is None or isinstance(voice, Voice):
            return voice
        if isinstance(voice, VoicePrompt):
            return Voice(voice)
        if voice not in self._named:
            known = ", ".join(self.names()) or "none is registered"
            raise RequestError(f"unknown voice {voice!r}; known voices: {known}")
        return self._named[voice]

    def prefix(self, voice: Voice) -> KVPrefix:
        """The prefilled prompt of a voice, computed once as long as it stays in the cache."""
        return self._prefixes.get_or_make(voice.id, lambda: self._prefill(voice.prompt))

    def _recall(self, key: str) -> Voice | None:
        """The voice that a slower tier has for these references."""
        key, codebooks = self._tier_key(key), self._codec.config.num_codebooks
        for tier in self._tiers:
            data = tier.get(key)
            if data is None:
                continue
            try:
                voice = Voice.from_bytes(data)
            except DamagedError as error:
                log.warning("cache tier %s: a voice is damaged and removed: %s", tier.name, error)
                tier.delete(key)
                continue
            if all(len(codes) == codebooks for codes in voice.prompt.codes):
                return voice
        return None

    def _encode_and_keep(self, key: str, references: Sequence[tuple[np.ndarray, str]]) -> Voice:
        voice = self._encode(references)
        for tier in self._tiers:
            tier.put(self._tier_key(key), voice.to_bytes())
        return voice

    def _tier_key(self, key: str) -> str:
        return f"voice:{self._fingerprint}:{key}"

    @torch.inference_mode()
    def _encode(self, references: Sequence[tuple[np.ndarray, str]]) -> Voice:
        longest = max((len(audio) for audio, _ in references), default=0)
        if not references or min(len(audio) for audio, _ in references) < self._codec.config.samples_per_frame:
            raise RequestError("a reference recording is shorter than one frame (0.05 s); use some seconds of speech")
        batch = torch.zeros(len(references), longest)
        for i, (audio, _) in enumerate(references):
            batch[i, : len(audio)] = torch.from_numpy(np.asarray(audio, dtype=np.float32))
        device = next(self._codec.parameters()).device
        lengths = torch.tensor([len(audio) for audio, _ in references], device=device)
        codes, frames = self._codec.encode(batch.to(device), lengths)
        parts = tuple(codes[i, :, : int(n)].to("cpu", copy=True) for i, n in enumerate(frames))
        return Voice(VoicePrompt(texts=tuple(text for _, text in references), codes=parts))


def _voice_bytes(voice: Voice) -> int:
    return sum(codes.nbytes for codes in voice.prompt.codes) + 1024


def _read_reference(file: Path, sample_rate: int) -> tuple[np.ndarray, str]:
    import soundfile
    import soxr

    text_file = next((file.with_suffix(s) for s in _TEXT_SUFFIXES if file.with_suffix(s).exists()), None)
    if text_file is None:
        raise ShoalError(f"{file}: its text is missing; put what is said there into {file.with_suffix('.txt').name}")
    try:
        audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise ShoalError(f"{file}: cannot be read as audio ({error}); use wav, flac, ogg or mp3") from None
    return soxr.resample(audio.mean(axis=1), rate, sample_rate), text_file.read_text(encoding="utf-8").strip()
