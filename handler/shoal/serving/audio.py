"""Sound in and out: float32 samples -> wav, pcm, flac, mp3, opus, whole or streamed; reference files -> samples.

Knows nothing of requests or models. Everything read here came from a stranger, so sizes are checked before memory is
taken, and files are decoded a second at a time.
"""

from __future__ import annotations

import io
import struct

import numpy as np
import soundfile as sf
import soxr

from shoal.errors import RequestError, TooLargeError
from shoal.serving.effects import Tempo, set_loudness

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
# What the encoders take; other rates are resampled to the next one up.
_RATES = {
    "mp3": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
    "opus": (8000, 12000, 16000, 24000, 48000),
}
_SOUNDFILE = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
_UNKNOWN = 0xFFFFFFFF  # a WAV size field that says "until the end of the stream"

_MIN_REFERENCE_SECONDS = 0.2
_MAX_CHANNELS = 8
_REFERENCE_RATES = (4_000, 192_000)  # Hz
_SILENT_PEAK = 1e-4
# Containers that libsndfile recognises by their own header, and that people record voices in.
_REFERENCE_FORMATS = frozenset({"WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "MPEG", "AIFF", "AU", "CAF"})


def output_rate(fmt: str, sample_rate: int) -> int:
    """The rate (Hz) that audio of `sample_rate` is encoded at in `fmt`: the same, or the next one the encoder takes."""
    rates = _RATES.get(fmt)
    if rates is None:
        return sample_rate
    return next((rate for rate in rates if rate >= sample_rate), rates[-1])


def to_int16(audio: np.ndarray) -> np.ndarray:
    """(samples,) float32 in [-1, 1] -> little-endian int16, clipped; NaN becomes silence."""
    return np.rint(np.clip(np.nan_to_num(audio, nan=0.0), -1.0, 1.0) * 32767.0).astype("<i2")


def encode_audio(
    audio: np.ndarray,
    sample_rate: int,
    fmt: str,
    rate: int | None = None,
    *,
    speed: float = 1.0,
    loudness: float | None = None,
) -> tuple[bytes, int]:
    """Encode a whole utterance.

    audio: (samples,) float32 at `sample_rate`; rate: Hz wanted in the reply, None for the same; loudness: LUFS, None as
    it is. Returns the bytes and the number of samples (at `sample_rate`) that are in them.
    """
    if speed != 1.0:
        tempo = Tempo(sample_rate, speed)
        audio = np.concatenate([tempo.push(audio), tempo.finish()])
    samples = len(audio)
    if loudness is not None and samples:
        # at the reply's rate: peaks between the samples would clip if they were resampled after the gain
        wanted = output_rate(fmt, rate or sample_rate)
        audio = set_loudness(soxr.resample(audio, sample_rate, wanted), wanted, loudness)
        sample_rate = wanted
    encoder = StreamEncoder(fmt, sample_rate, rate, total_samples=len(audio))
    return encoder.push(audio) + encoder.finish(), samples


class StreamEncoder:
    """Encodes one utterance piece by piece; the pieces joined are a playable file.

    Without `total_samples` the length is not known when the header is written: WAV then says "until the end", FLAC
    "unknown", and players show no duration. `push` may return b"" where an encoder gathers more before it writes.
    """

    def __init__(
        self,
        fmt: str,
        sample_rate: int,
        rate: int | None = None,
        total_samples: int | None = None,
        *,
        speed: float = 1.0,
    ) -> None:
        self.content_type = CONTENT_TYPES[fmt]
        self._tempo = Tempo(sample_rate, speed) if speed != 1.0 else None
        self.samples = 0  # at the model's rate, of what has been pushed and had its tempo changed
        self.rate = output_rate(fmt, rate or sample_rate)
        self._resampler = None
        if self.rate != sample_rate:
            self._resampler = soxr.ResampleStream(sample_rate, self.rate, 1, dtype="float32")
        self._sink: _Sink | None = None
        self._head = b""
        whole = total_samples is not None
        if fmt == "wav":
            # a resampler rounds the length its own way, so a whole WAV gets its header when all samples are there
            self._head = wav_header(self.rate)
            self._patch = whole
        if fmt in _SOUNDFILE:
            container, subtype = _SOUNDFILE[fmt]
            self._sink = _Sink(keep=whole)
            # a streamed MP3 has no frame count in front, and readers take the duration from the bit rate instead
            constant = {"bitrate_mode": "CONSTANT", "compression_level": 0.6} if fmt == "mp3" and not whole else {}
            self._file = sf.SoundFile(self._sink, "w", self.rate, 1, subtype=subtype, format=container, **constant)
        self._gathered: list[bytes] | None = [] if fmt == "wav" and whole else None

    def push(self, audio: np.ndarray) -> bytes:
        """(samples,) float32 at the model's rate -> the bytes that became ready."""
        audio = np.asarray(audio, dtype=np.float32)
        if self._tempo is not None:
            audio = self._tempo.push(audio)
        self.samples += len(audio)
        return self._write(audio, last=False)

    def finish(self) -> bytes:
        """The rest of the bytes. The encoder cannot be used afterwards."""
        rest = self._tempo.finish() if self._tempo is not None else np.zeros(0, dtype=np.float32)
        self.samples += len(rest)
        out = self._write(rest, last=True)
        if self._sink is not None:
            self._file.close()
            out += self._sink.take()
        if self._gathered is not None:
            data = b"".join(self._gathered)
            out = wav_header(self.rate, len(data)) + data
        return out

    def _write(self, audio: np.ndarray, *, last: bool) -> bytes:
        if self._resampler is not None:
            audio = self._resampler.resample_chunk(audio, last=last)
        samples = to_int16(audio)
        if self._sink is not None:
            for start in range(0, len(samples), self.rate):  # libsndfile's codecs take long blocks from the C stack
                self._file.write(samples[start : start + self.rate])
            return b"" if self._sink.keep else self._sink.take()
        data = samples.tobytes()
        if self._gathered is not None:
            self._gathered.append(data)
            return b""
        if data or last:
            data, self._head = self._head + data, b""
        return data


class _Sink(io.RawIOBase):
    """What libsndfile writes into. With keep=False bytes leave by take() and later header patches are dropped."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self._buffer = io.BytesIO()
        self._gone = 0  # bytes that take() already handed out
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        data = bytes(data)
        if self._at >= self._gone:
            self._buffer.seek(self._at - self._gone)
            self._buffer.write(data)
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end()}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        return 0

    def _end(self) -> int:
        return self._gone + self._buffer.getbuffer().nbytes

    def take(self) -> bytes:
        data = self._buffer.getvalue()
        self._gone += len(data)
        self._buffer = io.BytesIO()
        return data


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """44 bytes that introduce 16-bit mono PCM of `data_bytes` bytes; None means until the end of the stream."""
    size = _UNKNOWN if data_bytes is None else data_bytes
    riff = _UNKNOWN if data_bytes is None else data_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        riff,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        sample_rate,
        sample_rate * 2,
        2,
        16,
        b"data",
        size,
    )


class _ForwardFile(sf.SoundFile):
    """Reads straight on: soundfile otherwise seeks after each block, which fails in a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class _Recording(io.BytesIO):
    """A damaged file can send libsndfile before its beginning; where it may not go, it stays."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def decode_reference(data: bytes, target_rate: int, max_seconds: float, max_bytes: int) -> np.ndarray:
    """Read a voice sample of unknown origin: any common audio file -> (samples,) float32 mono at `target_rate` Hz.

    Raises TooLargeError for more than `max_bytes` or `max_seconds`, RequestError for what is no usable recording.
    """
    if len(data) > max_bytes:
        raise TooLargeError(f"reference audio has {len(data)} bytes, {max_bytes} are allowed; send a shorter sample")
    try:
        with _ForwardFile(_Recording(data)) as file:
            audio = _read_mono(file, max_seconds)
            rate = file.samplerate
    except RequestError:
        raise
    except Exception:  # libsndfile has many ways to refuse a file, and they all mean the same to the sender
        raise RequestError(
            "reference audio is not a sound file that can be read; send wav, flac, ogg or mp3, base64 encoded"
        ) from None
    if not np.isfinite(audio).all():
        raise RequestError("reference audio holds values that are no numbers (NaN or infinity); export it again")
    peak = float(np.abs(audio).max(initial=0.0))
    if peak < _SILENT_PEAK:
        raise RequestError("reference audio is silent; send a recording with a voice in it")
    if peak > 1.0:
        audio = audio / peak
    return soxr.resample(audio, rate, target_rate).astype(np.float32) if rate != target_rate else audio


def _read_mono(file: sf.SoundFile, max_seconds: float) -> np.ndarray:
    """(samples,) float32, channels averaged, a second at a time, so that a header cannot make us allocate."""
    rate, channels = file.samplerate, file.channels
    if file.format not in _REFERENCE_FORMATS:
        raise RequestError(f"reference audio is of type {file.format}; send wav, flac, ogg or mp3")
    if not _REFERENCE_RATES[0] <= rate <= _REFERENCE_RATES[1]:
        raise RequestError(f"reference audio claims {rate} Hz; send {_REFERENCE_RATES[0]} to {_REFERENCE_RATES[1]} Hz")
    if channels > _MAX_CHANNELS:
        raise RequestError(f"reference audio claims {channels} channels; send mono or stereo")
    most = int(max_seconds * rate)
    blocks, count = [], 0
    while True:
        block = file.read(min(rate, most + 1 - count), dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        blocks.append(block.mean(axis=1, dtype=np.float32))
        count += len(block)
        if count > most:
            raise TooLargeError(f"reference audio is longer than the {max_seconds:g} s allowed; send a shorter sample")
    if count < _MIN_REFERENCE_SECONDS * rate:
        raise RequestError(
            f"reference audio holds {count / rate:.2f} s of sound; send at least {_MIN_REFERENCE_SECONDS} s (a few "
            "seconds work best), and check that the file is complete"
        )
    return np.concatenate(blocks)
