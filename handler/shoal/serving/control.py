"""What can be changed while a server runs: a small file that its operator writes and the handler watches.

    from shoal.serving.control import read_limits, set_limits
    set_limits(server.control_file, batch_limit=4)

The file is named by `control` in model-config.yaml, or by $SHOAL_CONTROL, which `shoal serve` and
`shoal.serving.server.TorchServe` set to a file in their private directory. Whoever may write it may tune the server,
and nothing else; no request names it. What a file leaves out stays as it was configured. It is looked at a few times a
second while requests are worked on, and with each question about the server (`/v1/info`), which shows what holds.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shoal.errors import RequestError
from shoal.sizes import parse_bytes

logger = logging.getLogger(__name__)

_EVERY_S = 0.2
_LARGEST_FILE = 64 * 1024


class LiveLimits(BaseModel):
    """What holds from now on; None: as configured."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batch_limit: int | None = Field(None, gt=0)  # rows that decode at a time, up to max_batch_size
    max_waiting: int | None = Field(None, ge=0)  # requests beyond those, then 503
    cache_bytes: int | None = Field(None, ge=0)  # memory for the codes of finished utterances
    slice_ms: float | None = Field(None, gt=0, le=10_000)  # how long one call of the handler decodes
    draining: bool | None = None  # True: new requests get a 503, those that are there are finished

    @field_validator("cache_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        """A size may be written like "1.5GB"."""
        try:
            return parse_bytes(value) if isinstance(value, str) else value
        except RequestError as error:
            raise ValueError(str(error)) from None


def set_limits(file: str | Path, **values: Any) -> LiveLimits:
    """Change some of a running server's limits, named as in `LiveLimits`; None puts one back to what is configured.

    Returns what the file says now. The file is replaced in one go, so that the server never reads half of it.

    Raises:
        RequestError: a value is not allowed, or the file cannot be written.
    """
    file = Path(file)
    before = read_limits(file).model_dump() if file.exists() else {}
    limits = _checked(before | values)
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as new:
            json.dump(limits.model_dump(exclude_none=True), new)
        os.replace(new.name, file)
    except OSError as error:
        raise RequestError(f"the control file cannot be written: {error.strerror}") from None
    return limits


def read_limits(file: str | Path) -> LiveLimits:
    """What a control file says; all None where there is none.

    Raises:
        RequestError: it is no JSON object, or holds a value that is not allowed.
    """
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return LiveLimits()
    except OSError as error:
        raise RequestError(f"the control file cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_FILE:
        raise RequestError(f"the control file is larger than {_LARGEST_FILE} bytes")
    try:
        values = json.loads(content)
    except ValueError:
        raise RequestError("the control file is not valid JSON") from None
    return _checked(values)


def _checked(values: Any) -> LiveLimits:
    if not isinstance(values, dict):
        raise RequestError("the control file must hold a JSON object")
    try:
        return LiveLimits.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "control file"
        raise RequestError(f"{where}: {first['msg']} (found {first['input']!r})") from None


class ControlFile:
    """Watches one file for a handler; a file with a mistake changes nothing and is named in the log once."""

    def __init__(self, file: str | Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = Path(file) if file else None
        self._clock = clock
        self._next = -1.0
        self._seen: tuple[int, int, int] | None = None
        self.error: str | None = None  # what is wrong with the file as it is

    def poll(self, now: bool = False) -> LiveLimits | None:
        """What holds from now on, if the file has changed since the last time; None if not.

        now: look at it even if it was looked at a moment ago.
        """
        if self._file is None or (not now and self._clock() < self._next):
            return None
        self._next = self._clock() + _EVERY_S
        try:
            stat = self._file.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            seen = None
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            limits, self.error = read_limits(self._file), None
        except RequestError as error:
            self.error = str(error)
            logger.error("limits stay as they are: %s", error)
            return None
        logger.info("limits: %s", limits.model_dump_json(exclude_none=True))
        return limits
