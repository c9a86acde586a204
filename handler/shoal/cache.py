"""`AudioFeatureCache`: remembers the features of finished utterances, least recently used out first.

Knows keys, sizes and tiers (memory, then those of tiers.py, each slower and larger than the one before); knows nothing
of models. That equal requests at once decode once is the scheduler's doing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import shoal
from shoal.features import Features
from shoal.lru import ByteLRU
from shoal.packing import DamagedError
from shoal.sampling import SamplingParams
from shoal.sizes import parse_bytes
from shoal.text import prepare_text
from shoal.tiers import Tier

log = logging.getLogger(__name__)

_KEY_VERSION = 2  # raise it when the same request would sound different with newer code


@dataclass(frozen=True)
class CacheStats:
    """Counts since the start; `bytes` and `entries` are what memory holds now."""

    hits: int = 0  # answered without the language model, from any tier or by an equal request that was under way
    misses: int = 0
    evictions: int = 0  # from memory
    entries: int = 0
    bytes: int = 0
    seconds_saved: float = 0.0  # of the language model's time, by hits
    tier_hits: dict[str, int] = field(default_factory=dict)  # of the hits, those that a slower tier answered, by name

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class AudioFeatureCache:
    """A thread-safe LRU cache bounded by entries and by bytes, with slower tiers behind it.

    Args:
        cache_max_entries: bound of the memory tier; 0 keeps nothing in memory, None leaves it to the bytes.
        cache_max_bytes: bound on the features' size in memory, as a number or "1.5GB"; an entry larger than this is
            not kept there.
        tiers: asked in this order when memory has nothing; what one of them has moves into those before it.
    """

    def __init__(
        self,
        cache_max_entries: int | None = 100,
        cache_max_bytes: int | str = 64 * 1024**2,
        *,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._memory: ByteLRU[Features] = ByteLRU(parse_bytes(cache_max_bytes), lambda f: f.nbytes, cache_max_entries)
        self.tiers = tuple(tiers)
        self._stats = CacheStats()
        self._lock = threading.Lock()

    @property
    def cache_max_entries(self) -> int | None:
        return self._memory.max_entries

    @property
    def cache_max_bytes(self) -> int:
        return self._memory.max_bytes

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return bool(self.tiers) or (self.cache_max_entries != 0 and self.cache_max_bytes > 0)

    def set_capacity(self, max_bytes: int | str, max_entries: int | None = None) -> None:
        """New bounds of the memory tier, by bytes alone unless entries are given; what no longer fits leaves."""
        self._memory.set_bounds(parse_bytes(max_bytes), max_entries)

    def generate_cache_key(
        self, text: str, voice_id: str | None, params: SamplingParams, fingerprint: str, chunk_length: int = 200
    ) -> str:
        """A key that is the same in every process: cleaned text, voice content, parameters, seed, checkpoint, code.

        A request without a seed has a key of its own: any earlier answer to the same request without a seed will do.

        Raises:
            RequestError: there is nothing to speak in the text.
        """
        values = {k: float(v) if k not in ("seed", "max_new_tokens") else v for k, v in asdict(params).items()}
        parts = {
            "code": [_KEY_VERSION, shoal.__version__],
            "text": prepare_text(text, len(text)),
            "voice": voice_id,
            "params": values,
            "checkpoint": fingerprint,
            "chunk_length": chunk_length,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def retrieve_features(self, key: str) -> Features | None:
        """The features stored under `key`, now the most recently used; None if there are none."""
        found = self._memory.get(key)
        if found is not None:
            self.count_hit(found)
            return found
        for i, tier in enumerate(self.tiers):
            data = tier.get(_tier_key(key))
            if data is None:
                continue
            try:
                found = Features.from_bytes(data)
            except DamagedError as error:
                log.warning("cache tier %s: entry %s is damaged and removed: %s", tier.name, key[:12], error)
                tier.delete(_tier_key(key))
                continue
            self._memory.put(key, found)
            for faster in self.tiers[:i]:
                faster.put(_tier_key(key), data)
            self.count_hit(found, tier.name)
            return found
        with self._lock:
            self._stats = replace(self._stats, misses=self._stats.misses + 1)
        return None

    def in_memory(self, key: str) -> Features | None:
        """What memory has under `key`; nothing is counted."""
        return self._memory.get(key)

    def count_hit(self, features: Features, tier: str | None = None) -> None:
        """Count an answer that cost no decoding."""
        with self._lock:
            stats = self._stats
            by_tier = stats.tier_hits | ({tier: stats.tier_hits.get(tier, 0) + 1} if tier else {})
            saved = stats.seconds_saved + features.cost_s
            self._stats = replace(stats, hits=stats.hits + 1, seconds_saved=saved, tier_hits=by_tier)

    def store_features(self, key: str, features: Features) -> None:
        """Keep features under `key` in all tiers, dropping the least recently used ones that no longer fit."""
        if self.cache_max_entries != 0:
            self._memory.put(key, features)
        if self.tiers:
            data = features.to_bytes()
            for tier in self.tiers:
                tier.put(_tier_key(key), data)

    def clear(self, *, tiers: bool = False) -> None:
        """Forget what memory holds; with `tiers` also what the slower tiers hold."""
        self._memory.clear()
        for tier in self.tiers if tiers else ():
            tier.clear()

    def stats(self) -> CacheStats:
        with self._lock:
            memory = self._memory
            return replace(self._stats, entries=len(memory), bytes=memory.nbytes, evictions=memory.evictions)


def _tier_key(key: str) -> str:
    return f"features:{key}"
