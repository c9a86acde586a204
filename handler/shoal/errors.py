"""The exceptions a caller may catch. Each message says what was wrong and what to do about it.

`status` is the HTTP status that the server answers with; the library itself knows nothing of HTTP.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""

    status = 500


class CheckpointError(ShoalError):
    """A checkpoint directory cannot be used: names the file, what is wrong with it and what to do."""

    status = 500


class RequestError(ShoalError):
    """One request is wrong (text, parameters, reference audio, unknown voice); others are not affected."""

    status = 400


class TooLargeError(RequestError):
    """A request is well formed but exceeds a limit (text length, reference bytes or seconds)."""

    status = 413


class CapacityError(ShoalError):
    """No room now (queue full): the same request may succeed after `retry_after_s` seconds."""

    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(ShoalError):
    """A request ran longer than its time limit; what it had made was discarded."""

    status = 504


class OutOfMemoryError(ShoalError):
    """The device has no memory left for this request, also after freeing what could be freed."""

    status = 507


class CancelledError(ShoalError):
    """The caller cancelled the request."""

    status = 499


class DependencyError(ShoalError):
    """An optional package is missing; the message carries the command that installs it."""

    status = 500


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the machine or its GPU has no memory left, in whichever of the ways there are."""
    if isinstance(error, (MemoryError, OutOfMemoryError)) or type(error).__name__ == "OutOfMemoryError":  # torch's own
        return True
    words = str(error).lower()  # PyTorch's allocator for the CPU raises a plain RuntimeError
    return isinstance(error, RuntimeError) and ("allocate memory" in words or "out of memory" in words)
