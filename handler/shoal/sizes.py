"""Sizes of memory as people write them ("1.5GB") to bytes, and back."""

from __future__ import annotations

import re

from shoal.errors import RequestError

_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


def parse_bytes(size: int | float | str) -> int:
    """Bytes of "1.5GB", "512 MiB", "64k" or a plain number. K, M, G and T count in 1024s, as memory is sold.

    Raises:
        RequestError: it is no size, or negative.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and 0 <= size < float("inf"):
        return int(size)
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None:
        raise RequestError(f'{size!r} is no size: write bytes as a number, or something like "512MB" or "1.5GB"')
    return int(float(found[1]) * _UNITS[found[2].lower()])


def format_bytes(count: int) -> str:
    """ "1.5 GB", "64 MB", "900 B": for people to read."""
    for unit in ("TB", "GB", "MB", "KB"):
        step = _UNITS[unit[0].lower()]
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count} B"
