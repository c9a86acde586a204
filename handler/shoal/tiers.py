"""Slower, larger places behind a cache in memory: a directory, and a Redis or Valkey server. Bytes in, bytes out.

They know keys (ASCII strings) and bytes, and nothing of what these mean. A tier that fails is a tier that has nothing:
no call raises for it, the reason is logged, and it is left alone for some seconds before it is tried again. Nothing is
ever unpickled here.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from shoal.errors import DependencyError, ShoalError
from shoal.sizes import parse_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tier(Protocol):
    """What a cache needs of a slower place. No method raises for a failure of the place."""

    name: str

    @property
    def errors(self) -> int:
        """Calls that the place failed so far; those that were skipped after them do not count."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None: ...

    def delete(self, key: str) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Guard:
    """Runs calls that may fail; after a failure it skips them for `rest_s` seconds, so that nobody waits in vain.

    Args:
        refusals: errors that say no to one call only; the next one is tried as usual.
    """

    def __init__(
        self,
        name: str,
        errors: tuple[type[Exception], ...],
        rest_s: float,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        self._name, self._errors, self._rest_s, self._refusals = name, errors, rest_s, refusals
        self._resume = 0.0
        self.errors = 0

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._resume

    def run(self, work: Callable[[], T], otherwise: T, on_error: Callable[[Exception], None] | None = None) -> T:
        if self.resting:
            return otherwise
        try:
            result = work()
        except self._refusals as error:
            self.errors += 1
            log.debug("cache tier %s refused: %s", self._name, error)
            return otherwise
        except self._errors as error:
            self.errors += 1
            if not self._resume:
                log.warning("cache tier %s is left out for now: %s", self._name, error)
            self._resume = time.monotonic() + self._rest_s
            if on_error:
                on_error(error)
            return otherwise
        if self._resume:
            log.info("cache tier %s works again", self._name)
            self._resume = 0.0
        return result


class DiskTier:
    """Entries in a directory that survive restarts; several processes may share it. Least recently used out first.

    Args:
        directory: made where it is missing; holds nothing else. Only its owner may read it: texts are in there.
        max_bytes: bound on the size of its file, as a number or "2GB".

    Raises:
        DependencyError: the package diskcache is missing.
        ShoalError: the directory cannot be written.
    """

    name = "disk"

    def __init__(self, directory: str | Path, max_bytes: int | str = "1GB", *, rest_s: float = 5.0) -> None:
        try:
            import diskcache
        except ImportError:
            raise DependencyError("a cache on disk needs the package diskcache: pip install diskcache") from None
        self.directory, self.max_bytes = Path(directory).expanduser().absolute(), parse_bytes(max_bytes)
        self._lock = threading.Lock()
        failures = (sqlite3.Error, OSError, diskcache.Timeout, ValueError)
        self._guard = _Guard(self.name, failures, rest_s)
        self._filling = _Guard(f"{self.name} (writing)", failures, rest_s)  # a full disk can still be read
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._cache = self._open()
        except OSError as error:
            raise ShoalError(f"{self.directory}: a cache cannot be kept there ({error}); name another one") from None

    @property
    def errors(self) -> int:
        return self._guard.errors + self._filling.errors

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._guard.run(self._cache.volume, 0, self._repair)

    def __len__(self) -> int:
        return self._guard.run(lambda: len(self._cache), 0, self._repair)

    def get(self, key: str) -> bytes | None:
        return self._guard.run(lambda: self._cache.get(key), None, self._repair)

    def put(self, key: str, data: bytes) -> None:
        # one entry that pushes out all others is no use
        if len(data) <= self.max_bytes // 4 and not self._guard.resting:
            self._filling.run(lambda: self._cache.set(key, data), False, self._repair)

    def delete(self, key: str) -> None:
        self._guard.run(lambda: self._cache.delete(key), False, self._repair)

    def clear(self) -> None:
        self._guard.run(self._cache.clear, 0, self._repair)

    def close(self) -> None:
        self._cache.close()

    def _open(self) -> Any:
        import diskcache

        def open_it() -> Any:
            return diskcache.Cache(
                str(self.directory),
                timeout=1.0,
                disk=_raw_disk(),
                size_limit=self.max_bytes,
                eviction_policy="least-recently-used",
                cull_limit=32,  # entries thrown out at most per entry that comes in
                disk_min_file_size=0,
                sqlite_mmap_size=0,  # another process that truncates the file must not end this one
                sqlite_cache_size=256,  # pages of 4 KB, per thread
            )

        try:
            return open_it()
        except (sqlite3.Error, TypeError, ValueError) as error:
            self._empty(error)
            return open_it()

    def _repair(self, error: Exception) -> None:
        """Start anew where the file is no longer a database; a locked or full disk only needs patience."""
        lost = isinstance(error, sqlite3.OperationalError) and "no such table" in str(error)
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if not (lost or damaged):
            return
        with self._lock:
            self._cache.close()
            try:
                self._empty(error)
                self._cache = self._open()
            except (sqlite3.Error, OSError) as again:
                log.warning("cache on disk %s: it cannot be made anew: %s", self.directory, again)

    def _empty(self, error: Exception) -> None:
        log.warning("cache on disk %s is damaged (%s): all entries are dropped", self.directory, error)
        for file in self.directory.glob("cache.db*"):
            file.unlink(missing_ok=True)


def _raw_disk() -> type:
    """diskcache's way to the database, reduced to bytes in the database itself: no pickle, no files named by it."""
    import diskcache
    from diskcache.core import MODE_RAW, UNKNOWN

    class RawDisk(diskcache.Disk):
        def put(self, key: Any) -> tuple[Any, bool]:
            if type(key) is not str:
                raise ValueError(f"a key must be a string, not {type(key).__name__}")
            return key, True

        def get(self, key: Any, raw: bool) -> Any:
            if not raw:
                raise ValueError("a key that was not written by Shoal")
            return key

        def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, Any]:
            if type(value) is not bytes:
                raise ValueError(f"a value must be bytes, not {type(value).__name__}")
            return 0, MODE_RAW, None, sqlite3.Binary(value)

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
            # anything else comes back as bytes that fail their check, so that it is removed
            return bytes(value) if mode == MODE_RAW and filename is None and isinstance(value, bytes) else b""

        def remove(self, file_path: str) -> None:
            """Nothing of ours lies in files."""

    return RawDisk


class RedisTier:
    """Entries on a Redis or Valkey server, shared by workers and machines. Bounded by the server's own maxmemory.

    Args:
        url: "redis://[[user]:password@]host[:port][/db]", "rediss://..." or "unix://path".
        prefix: before each key, so that others may use the same server.
        ttl_s: seconds that an entry is kept; None for as long as the server likes.
        timeout_s: longest wait for one answer.
        rest_s: after a failure the server is left alone for so long.

    Raises:
        DependencyError: the package redis is missing.
        ShoalError: the URL is none that it knows.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "shoal:",
        ttl_s: float | None = None,
        timeout_s: float = 0.25,
        rest_s: float = 5.0,
        max_entry_bytes: int | str = "64MB",
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise DependencyError("a cache on Redis needs the package redis: pip install redis") from None
        self._prefix, self._ttl_ms = prefix, None if ttl_s is None else max(1, int(ttl_s * 1000))
        self._max_entry_bytes = parse_bytes(max_entry_bytes)
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # the guard below says when to try again
                decode_responses=False,
            )
        except ValueError as error:
            raise ShoalError(f"{_without_password(url)!r} is no address of a Redis server: {error}") from None
        self._guard = _Guard(
            f"{self.name} at {_without_password(url)}",
            (redis.RedisError, OSError),
            rest_s,
            refusals=(redis.ResponseError,),  # full, or another type of value under that key
        )

    @property
    def errors(self) -> int:
        return self._guard.errors

    def get(self, key: str) -> bytes | None:
        # read no more than an entry can be, whatever lies there
        data = self._guard.run(lambda: self._client.getrange(self._prefix + key, 0, self._max_entry_bytes), None)
        return data or None

    def put(self, key: str, data: bytes) -> None:
        if len(data) <= self._max_entry_bytes:
            self._guard.run(lambda: self._client.set(self._prefix + key, data, px=self._ttl_ms), None)

    def delete(self, key: str) -> None:
        self._guard.run(lambda: self._client.delete(self._prefix + key), None)

    def clear(self) -> None:
        """Remove all entries with our prefix."""

        def work() -> None:
            for key in self._client.scan_iter(match=_escaped(self._prefix) + "*", count=500):
                self._client.delete(key)

        self._guard.run(work, None)

    def close(self) -> None:
        self._client.close()


def _escaped(prefix: str) -> str:
    return "".join("\\" + char if char in "*?[]^\\" else char for char in prefix)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
