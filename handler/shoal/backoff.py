"""How many rows may decode after memory has run out: half as many at once, twice as many after a quiet while."""

from __future__ import annotations

import time
from collections.abc import Callable

_QUIET_S = 10.0  # without running out again, before twice as many rows are tried


class MemoryBackoff:
    """A batch limit that gives way and comes back.

    Args:
        wanted: rows when nothing is wrong.
        clock: monotonic seconds.
    """

    def __init__(self, wanted: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._limit, self._clock = wanted, wanted, clock
        self._since = 0.0

    def ran_out(self, rows: int) -> int:
        """Memory ran out while so many rows decoded; the new limit."""
        self._limit = max(1, min(self._limit, max(rows, 1)) // 2)
        self._since = self._clock()
        return self._limit

    def limit(self) -> int:
        """Rows that may decode now."""
        if self._limit < self._wanted and self._clock() - self._since >= _QUIET_S:
            self._limit = min(2 * self._limit, self._wanted)
            self._since = self._clock()
        return self._limit
