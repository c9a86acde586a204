"""`AudioCache`: finished sound, so that a repeated phrase costs not even the codec. Optional; bounded by bytes.

Sound is a hundred times larger than the features it comes from, hence a budget of its own. Knows nothing of requests.
"""

from __future__ import annotations

from shoal.features import Features
from shoal.lru import ByteLRU
from shoal.sizes import parse_bytes

SAMPLES = "f32"  # the format of samples as they leave the codec: float32, the machine's byte order


class AudioCache:
    """A thread-safe LRU cache of encoded audio.

    Args:
        max_bytes: bound on the audio's size, as a number or "256MB"; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int | str = "256MB") -> None:
        self._audio: ByteLRU[bytes] = ByteLRU(parse_bytes(max_bytes), len)
        self.hits = self.misses = 0

    @property
    def nbytes(self) -> int:
        return self._audio.nbytes

    @property
    def max_bytes(self) -> int:
        return self._audio.max_bytes

    def __len__(self) -> int:
        return len(self._audio)

    def __contains__(self, key: str) -> bool:
        return key in self._audio

    def generate_key(
        self, features: Features, audio_format: str = SAMPLES, *, sample_rate: int | None = None, speed: float = 1.0
    ) -> str:
        """What the bytes depend on: the features' content, format, rate (Hz; None: the model's) and speed."""
        return f"{features.digest}/{audio_format}/{sample_rate or 0}/{float(speed)!r}"

    def retrieve(self, key: str) -> bytes | None:
        found = self._audio.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def store(self, key: str, audio: bytes) -> None:
        """Keep audio, dropping the least recently used that no longer fits."""
        self._audio.put(key, audio)

    def set_capacity(self, max_bytes: int | str) -> None:
        """A new bound; what no longer fits leaves at once."""
        self._audio.set_bounds(parse_bytes(max_bytes))

    def clear(self) -> None:
        self._audio.clear()
