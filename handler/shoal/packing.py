"""Arrays and what is said about them -> bytes for disk or network, and back. Nothing in them can run or be trusted.

Layout: magic (8 bytes), length of the header (4 bytes, little-endian), header (JSON: kind, fields, shapes), the arrays
one after the other (int16, little-endian), and the first 16 bytes of a SHA-256 over all before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MAGIC = b"SHOAL\x00\x01\n"
_DIGEST = 16
_FRAME = len(_MAGIC) + 4 + _DIGEST


class DamagedError(ValueError):
    """Bytes that are not, or no longer, what `pack` made of that kind."""


def pack(kind: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Bytes that hold `fields` (JSON values) and int16 `arrays` of any shape."""
    parts = [np.ascontiguousarray(array, dtype="<i2") for array in arrays]
    header = json.dumps({"kind": kind, "fields": dict(fields), "shapes": [part.shape for part in parts]}).encode()
    body = b"".join([_MAGIC, struct.pack("<I", len(header)), header, *(part.tobytes() for part in parts)])
    return body + hashlib.sha256(body).digest()[:_DIGEST]


def unpack(kind: str, data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What `pack` was given. Raises DamagedError for anything else: cut, changed, of another kind or version."""
    if not isinstance(data, bytes) or len(data) < _FRAME or not data.startswith(_MAGIC):
        raise DamagedError("it was not written by Shoal")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest()[:_DIGEST] != digest:
        raise DamagedError("it is cut short or changed")
    try:
        begin = len(_MAGIC) + 4
        end = begin + struct.unpack("<I", body[len(_MAGIC) : begin])[0]
        header = json.loads(body[begin:end])
        if header["kind"] != kind:
            raise DamagedError(f"it holds {header['kind']!r}, not {kind!r}")
        shapes = [tuple(int(n) for n in shape) for shape in header["shapes"]]
        sizes = [2 * math.prod(shape) for shape in shapes]
        if any(n < 0 for shape in shapes for n in shape) or end + sum(sizes) != len(body):
            raise DamagedError("its arrays have another size than it says")
        arrays = []
        for shape, size in zip(shapes, sizes, strict=True):
            arrays.append(np.frombuffer(body, "<i2", size // 2, end).reshape(shape).astype(np.int16))
            end += size
        return dict(header["fields"]), arrays
    except (KeyError, TypeError, ValueError, struct.error) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"its header cannot be read ({error})") from None
