"""A thread-safe map bounded by bytes and entries, least recently used out first; its values are shared, not copied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteLRU(Generic[V]):
    """Keeps what was used last. Values in use stay alive after they left.

    Args:
        max_bytes: bound on the sum of sizes; a value larger than this is not kept.
        size_of: bytes of a value; must not change while it is held.
        max_entries: bound on their number; None for none.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int], max_entries: int | None = None) -> None:
        self._max_bytes, self._size_of, self._max_entries = max_bytes, size_of, max_entries
        self._entries: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def max_entries(self) -> int | None:
        return self._max_entries

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> V | None:
        """The value under `key`, now the most recently used; None if there is none."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: str, value: V) -> None:
        """Keep a value, dropping the least recently used ones that no longer fit."""
        size = self._size_of(value)
        with self._lock:
            self.discard(key)
            if size > self._max_bytes:
                return
            self._entries[key] = value
            self._bytes += size
            self._shrink()

    def get_or_make(self, key: str, make: Callable[[], V]) -> V:
        """The value under `key`, made with `make` where there is none; one thread at a time. Errors of `make` pass."""
        with self._lock:
            value = self.get(key)
            if value is None:
                value = make()
                self.put(key, value)
            return value

    def discard(self, key: str) -> None:
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self._bytes -= self._size_of(old)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def set_bounds(self, max_bytes: int, max_entries: int | None = None) -> None:
        """New bounds; what no longer fits leaves at once."""
        with self._lock:
            self._max_bytes, self._max_entries = max_bytes, max_entries
            self._shrink()

    def _shrink(self) -> None:
        most = len(self._entries) if self._max_entries is None else self._max_entries
        while self._entries and (self._bytes > self._max_bytes or len(self._entries) > most):
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= self._size_of(oldest)
            self.evictions += 1
