"""A thread-safe LRU map bounded by bytes; for what is costly to make and safe to share once made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteLRU(Generic[V]):
    """`get_or_make` makes a value at most once per key at a time; values in use stay alive after eviction."""

    def __init__(self, max_bytes: int, size_of: Callable[[V], int]) -> None:
        self.max_bytes, self._size_of = max_bytes, size_of
        self._entries: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_make(self, key: str, make: Callable[[], V]) -> V:
        """The value under `key`; made with `make` where there is none. Errors of `make` are passed on."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
            value = make()
            size = self._size_of(value)
            if size <= self.max_bytes:
                self._entries[key] = value
                self._bytes += size
                while self._bytes > self.max_bytes:
                    _, oldest = self._entries.popitem(last=False)
                    self._bytes -= self._size_of(oldest)
            return value
