"""`AudioFeatureCache`: remembers the features of finished utterances, least recently used out first.

Knows keys and sizes; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace

from shoal.features import Features
from shoal.sampling import SamplingParams

_KEY_VERSION = 1  # raise it when the same request would sound different with newer code


@dataclass(frozen=True)
class CacheStats:
    """Counts since the start; `bytes` and `entries` are what is held now."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class AudioFeatureCache:
    """A thread-safe LRU cache bounded by entries and by bytes.

    Args:
        cache_max_entries: 0 turns the cache off.
        cache_max_bytes: bound on the features' size; an entry larger than this is not kept.
    """

    def __init__(self, cache_max_entries: int = 100, cache_max_bytes: int = 64 * 1024**2) -> None:
        self.cache_max_entries, self.cache_max_bytes = cache_max_entries, cache_max_bytes
        self._entries: OrderedDict[str, Features] = OrderedDict()
        self._stats = CacheStats()
        self._lock = threading.Lock()

    def generate_cache_key(
        self, text: str, voice_id: str | None, params: SamplingParams, fingerprint: str, chunk_length: int = 200
    ) -> str:
        """A key that is the same in every process: text (as cleaned), voice content, parameters, seed and checkpoint.

        A request without a seed has a key of its own: any earlier answer to the same request without a seed will do.
        """
        parts = [_KEY_VERSION, text, voice_id, asdict(params), fingerprint, chunk_length]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def retrieve_features(self, key: str) -> Features | None:
        """The features stored under `key`, now the most recently used; None if there are none."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._stats = replace(self._stats, misses=self._stats.misses + 1)
                return None
            self._entries.move_to_end(key)
            self._stats = replace(self._stats, hits=self._stats.hits + 1)
            return found

    def store_features(self, key: str, features: Features) -> None:
        """Keep features under `key`, dropping the least recently used ones that no longer fit."""
        if self.cache_max_entries < 1 or features.nbytes > self.cache_max_bytes:
            return
        with self._lock:
            held = self._stats.bytes - (self._entries.pop(key).nbytes if key in self._entries else 0)
            self._entries[key] = features
            held += features.nbytes
            evictions = self._stats.evictions
            while len(self._entries) > self.cache_max_entries or held > self.cache_max_bytes:
                _, oldest = self._entries.popitem(last=False)
                held -= oldest.nbytes
                evictions += 1
            self._stats = replace(self._stats, bytes=held, entries=len(self._entries), evictions=evictions)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, bytes=0, entries=0)

    def stats(self) -> CacheStats:
        with self._lock:
            return self._stats
