"""What goes back to a client: replies with status and headers, errors as JSON, and server-sent events.

Knows nothing of how audio is made. An error's reply never holds a stack trace or a path of this machine: what a client
did wrong is said in full, what went wrong in here gets an id that the log holds, too.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from shoal.errors import (
    CancelledError,
    CapacityError,
    OutOfMemoryError,
    RequestError,
    RequestTimeoutError,
    ShoalError,
    TooLargeError,
)

logger = logging.getLogger(__name__)

# First match wins, so subclasses stand before their bases.
_TYPES: tuple[tuple[type[ShoalError], str], ...] = (
    (TooLargeError, "too_large"),
    (RequestError, "invalid_request_error"),
    (CapacityError, "overloaded"),
    (RequestTimeoutError, "timeout"),
    (OutOfMemoryError, "out_of_memory"),
    (CancelledError, "cancelled"),
)


@dataclass(frozen=True)
class Reply:
    """One thing to tell one client. A request has one reply, or, when it streams, several, the last with final=True."""

    status: int
    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    final: bool = True
    stream: bool = False  # a part of a chunked reply; its status and headers count only in the first part

    @property
    def phrase(self) -> str:
        """The reason phrase that belongs to the status."""
        try:
            return HTTPStatus(self.status).phrase
        except ValueError:
            return "Error"


def presentable(exc: BaseException, request_id: str) -> ShoalError:
    """The error as its sender may see it; what was not expected is logged, and becomes a 500 with an id to find it."""
    if isinstance(exc, tuple(known for known, _ in _TYPES)):
        return exc
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        logger.error("request %s: out of memory", request_id, exc_info=exc)
        return OutOfMemoryError(
            "the device has no memory left for this request; send a shorter text or try again later"
        )
    error_id = secrets.token_hex(4)
    logger.error("request %s failed unexpectedly, error id %s", request_id, error_id, exc_info=exc)
    return ShoalError(f"internal error {error_id}; the server's log tells more under this id")


def kind_of(error: ShoalError) -> str:
    """The `type` of an error in replies and logs."""
    return next((name for known, name in _TYPES if isinstance(error, known)), "internal_error")


def error_body(error: ShoalError, *, openai: bool = False) -> dict[str, Any]:
    """The JSON object of an error. OpenAI's clients look for an "error" object, so their route gets one besides."""
    kind = kind_of(error)
    fields: dict[str, Any] = {"code": error.status, "type": kind, "message": str(error)}
    if openai:
        fields["error"] = {"message": str(error), "type": kind, "code": None, "param": None}
    return fields


def error_reply(error: ShoalError, *, openai: bool = False) -> Reply:
    """The reply that tells a client of an error that `presentable` has passed."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return Reply(error.status, "application/json", json.dumps(error_body(error, openai=openai)).encode(), headers)


def sse_delta(audio: bytes) -> bytes:
    """OpenAI's event that carries a piece of encoded audio; nothing for no audio."""
    if not audio:
        return b""
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode("ascii")})


def sse_done(input_tokens: int, output_tokens: int) -> bytes:
    """OpenAI's event that ends a stream."""
    usage = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    return _event({"type": "speech.audio.done", "usage": usage})


def sse_error(error: ShoalError) -> bytes:
    """An error after the stream has begun, when the status can no longer say it."""
    return _event({"type": "error", **error_body(error, openai=True)})


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()
